"""Nothing that a configuration, a path or an environment says is ever run or shown.

60 injection payloads through every text that reaches sbatch or srun, and 20 secret canaries. A
payload would create a file: none may exist afterwards, wherever it was put.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch_cases import MODEL

from megatron_patch import config
from megatron_patch.config import ConfigError
from megatron_patch.launcher import rank, submit

PAYLOADS = [
    "$(touch {mark})",
    "`touch {mark}`",
    "; touch {mark} #",
    "x' ; touch {mark} ; '",
    'x"; touch {mark}; "',
    "x\ntouch {mark}\n",
    "x\n#SBATCH --wrap=touch\ntouch {mark}",
    "| touch {mark}",
    "&& touch {mark}",
    "${{IFS}}touch${{IFS}}{mark}",
    "x) ; touch {mark} ; (",
    "a --wrap='touch {mark}'",
]
# Where they are put: through YAML, through --set (both), as a variable's name and value.
PLACES = ["name", "run_dir", "cluster.partition", "cluster.account", "cluster.qos",
          "cluster.constraint", "cluster.exclude_nodes", "cluster.time_limit", "cluster.python",
          "cluster.setup_script", "cluster.local_dir", "cluster.container.image"]  # fmt: skip
CASES = [(place, payload) for place, payload in itertools.product(PLACES, PAYLOADS)][::3]
CASES += [(f"cluster.{where}", payload) for where, payload in itertools.product(
    ("container.mounts", "environment.name", "environment.value", "environment.reason",
     "pass_environment", "secrets_file"), PAYLOADS)][::6]  # fmt: skip
BASE = "cluster: {gpus_per_node: 0, ranks_per_node: 1, preflight: {enabled: false}}\n"

CANARIES = [
    "WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY",
    "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "OPENAI_API_KEY", "GITHUB_TOKEN", "GH_TOKEN",
    "GITLAB_TOKEN", "NGC_API_KEY", "COMET_API_KEY", "MLFLOW_TRACKING_PASSWORD", "DB_PASSWORD",
    "SLACK_WEBHOOK_SECRET", "AZURE_CLIENT_SECRET", "GOOGLE_CREDENTIALS", "SSH_PASSPHRASE",
    "KRB5_PASSWD", "SESSION_COOKIE",
]  # fmt: skip


def quoted(text: str) -> str:
    """``text`` as a double-quoted YAML scalar."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def tree(place: str, text: str) -> str:
    """The YAML of a configuration with ``text`` at ``place``."""
    body = MODEL.format(name="demo", device="cpu")
    base = "  gpus_per_node: 0\n  ranks_per_node: 1\n  preflight: {enabled: false}\n"
    keys = place.removeprefix("cluster.").split(".")
    value = quoted(text)
    if place == "name":
        return body.replace("name: demo", f"name: {value}") + "cluster:\n" + base
    if place == "run_dir":
        return body + f"run_dir: {value}\ncluster:\n" + base
    if keys[0] == "environment":
        entry = {"name": "OK", "value": "ok", "reason": "ok"}
        parts = [f"{k}: {value if k == keys[1] else v}" for k, v in entry.items()]
        return body + "cluster:\n" + base + "  environment: [{" + ", ".join(parts) + "}]\n"
    if keys[0] == "pass_environment":
        return body + "cluster:\n" + base + f"  pass_environment: [{value}]\n"
    if keys[0] == "container":
        item = f"[{value}]" if keys[1] == "mounts" else value
        return body + "cluster:\n" + base + f"  container: {{{keys[1]}: {item}}}\n"
    return body + "cluster:\n" + base + f"  {keys[0]}: {value}\n"


def test_there_are_sixty():
    assert len(CASES) == 60 and len(set(CASES)) == 60
    assert len(set(CANARIES)) == 20


@pytest.mark.parametrize("number", range(60))
def test_injection(number, shims):
    """Refused with the key's name, or harmless: the script is then run to its end."""
    place, payload = CASES[number]
    mark = shims.folder / "pwned"
    text = payload.format(mark=mark)
    path = shims.folder / "run.yaml"
    path.write_text(tree(place, text))
    refused = ""
    try:
        loaded = config.load(path)
        script = submit.write(submit.build_job(loaded, 2, work_dir=shims.folder), loaded)
    except ConfigError as error:
        refused = str(error)
    else:
        (shims.shim / "scenario.0").write_text(
            f'RUN="{loaded.config.run_dir or shims.run}"; finish'
        )
        subprocess.run(["bash", script], env=shims.environment, cwd=shims.folder, check=False,
                       capture_output=True, timeout=600)  # fmt: skip
    assert not mark.exists()
    assert not list(shims.folder.rglob("pwned"))
    if place != "cluster.environment.reason":
        assert place.rsplit(".", 1)[0].split(".")[0] in refused and refused


@pytest.mark.parametrize("payload", PAYLOADS)
def test_injection_through_overrides_and_the_working_directory(payload, shims, monkeypatch):
    mark = shims.folder / "pwned"
    text = payload.format(mark="pwned")
    path = shims.folder / "run.yaml"
    path.write_text(MODEL.format(name="demo", device="cpu") + BASE)
    with pytest.raises(ConfigError):
        config.load(path, [f"cluster.partition={text}"])
    folder = shims.folder / text.replace("/", "_")
    folder.mkdir()
    with pytest.raises(ConfigError, match="working directory"):
        submit.build_job(config.load(path), 2, work_dir=folder)
    assert not mark.exists()


def test_no_shell_in_the_launcher():
    """No eval, no shell=True, no os.system: arguments travel as lists."""
    root = Path(submit.__file__).parent
    text = "".join(p.read_text() for p in root.glob("*.py"))
    assert not re.search(r"shell\s*=\s*True|os\.system|os\.popen|\beval\(|\bexec\(", text)
    for script in (root.parent.parent / "launch").iterdir():
        code = "\n".join(x.split("#")[0] for x in script.read_text().splitlines())
        assert not re.search(r"\beval\b|set -[a-z]*x|bash -c|printenv|\bexport -p", code), script


def test_canaries_in_the_submitting_shell(shims):
    """20 secrets in the environment: none in any file, argument or log, unless it is named."""
    secrets = {name: f"canary-{number}-of-twenty" for number, name in enumerate(CANARIES)}
    cluster = "  pass_environment: [WANDB_API_KEY]\n"
    code, output = shims.drive("leave 1 1; exit 1", "finish", cluster=cluster, **secrets)
    assert code == 0
    seen = output
    for path in shims.folder.rglob("*"):
        if path.is_file() and not path.name.startswith("env."):
            seen += path.read_text(errors="replace")
    assert "canary-" not in seen
    for call in shims.calls("srun"):
        (names,) = (a for a in call if a.startswith("--export="))
        assert set(names.removeprefix("--export=").split(",")) & set(CANARIES) == {"WANDB_API_KEY"}
        assert "ALL" not in names and "=" not in names.removeprefix("--export=")
    script = (shims.run / "launch" / "job.sbatch").read_text()
    (line,) = (x for x in script.splitlines() if x.startswith("#SBATCH --export="))
    assert "WANDB_API_KEY" in line and "HF_TOKEN" not in line and "ALL" not in line


@pytest.mark.parametrize("name", CANARIES)
def test_a_secret_cannot_be_written_into_the_script(name, shims):
    path = shims.folder / "run.yaml"
    entry = f"cluster: {{environment: [{{name: {name}, value: canary, reason: x}}]}}\n"
    path.write_text(MODEL.format(name="demo", device="cpu") + entry)
    with pytest.raises(ConfigError, match="secrets_file") as error:
        config.load(path)
    assert "canary" not in str(error.value)


@pytest.mark.parametrize(
    "entry",
    ["{name: HF_TOKEN, value: 'canary $x', reason: x}",
     "{name: OK, value: hf_canarycanarycanarycanarycanarycanary, reason: x}"],
)  # fmt: skip
def test_a_refused_secret_is_not_repeated(entry, shims):
    """Beside a value that is malformed; by the look of the value alone."""
    path = shims.folder / "run.yaml"
    path.write_text(
        MODEL.format(name="demo", device="cpu") + f"cluster: {{environment: [{entry}]}}\n"
    )
    with pytest.raises(ConfigError) as error:
        config.load(path)
    assert "canary" not in str(error.value)


def start_rank(
    tmp_path: Path, program: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A rank as torchrun starts it."""
    (tmp_path / "program.py").write_text(program)
    return subprocess.run(
        [sys.executable, "-m", "megatron_patch.launcher.rank", str(tmp_path / "program.py")],
        env={"PATH": os.environ["PATH"], "RANK": "3", rank.ATTEMPT_DIR: str(tmp_path / "attempt"),
             **environment}, capture_output=True, text=True, check=False, timeout=600,
        cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip


def test_secrets_file_reaches_the_rank_and_nothing_else(tmp_path):
    """Values are in the rank's environment, not in its process list entry, log or exit file."""
    file = tmp_path / "secrets"
    file.write_text("# keys\nWANDB_API_KEY=canary-1 $(touch pwned)\nHF_TOKEN=canary=2\n")
    file.chmod(0o600)
    program = (
        "import os\n"
        "assert os.environ['WANDB_API_KEY'] == 'canary-1 $(touch pwned)'\n"
        "assert os.environ['HF_TOKEN'] == 'canary=2'\n"
        "own = open('/proc/self/environ').read() + open('/proc/self/cmdline').read()\n"
        "assert 'canary' not in own\n"
        "raise RuntimeError('a fault')\n"
    )
    answer = start_rank(tmp_path, program, **{rank.SECRETS_FILE: str(file)})
    assert answer.returncode == 1
    log = (tmp_path / "attempt" / "rank_00003.log").read_text()
    assert "RuntimeError: a fault" in log
    assert "canary" not in log + (tmp_path / "attempt" / "exit" / "00003").read_text()


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [("A=canary", 0o644, "mode 0600"), ("A=canary", 0o660, "mode 0600"),
     ("canary", 0o600, ":1: is not NAME=VALUE"), (None, 0o600, "FileNotFoundError")],
)  # fmt: skip
def test_bad_secrets_file_is_a_configuration_error(tmp_path, text, mode, message):
    file = tmp_path / "secrets"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    answer = start_rank(tmp_path, "", **{rank.SECRETS_FILE: str(file)})
    log = (tmp_path / "attempt" / "rank_00003.log").read_text()
    assert answer.returncode == 2 and message in log and "canary" not in log
    assert (tmp_path / "attempt" / "exit" / "00003").read_text().startswith("2 ")


@pytest.mark.parametrize(
    ("program", "code", "reason"),
    [("", 0, "ended"), ("raise SystemExit(3)", 3, "ended"), ("raise SystemExit", 0, "ended"),
     ("raise SystemExit('no data')", 1, "no data"), ("1 / 0", 1, "ZeroDivisionError"),
     ("raise KeyboardInterrupt", 1, "KeyboardInterrupt")],
)  # fmt: skip
def test_exit_code_of_a_rank_is_left_in_a_file(tmp_path, program, code, reason):
    """torchrun would turn every one of them into 1."""
    assert start_rank(tmp_path, program).returncode == code
    left = (tmp_path / "attempt" / "exit" / "00003").read_text().split(" ", 2)
    assert left[0] == str(code) and reason in left[2] and float(left[1]) > 0
