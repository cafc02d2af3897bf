"""scripts/install_slurm.sh through shims: nothing is installed, whatever this machine has."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))

from script_shims import ROOT, ScriptShims

SCRIPT = ROOT / "scripts" / "install_slurm.sh"
CANNOT, WRONG = 69, 1
TOOLS = re.search(r"^tools=\((.*)\)$", SCRIPT.read_text(), re.MULTILINE)[1].split()
# apt-get, by what it is asked for: `update`, `download` and `unpack` are the functions of a test.
APT_GET = """\
update() { :; }
download() { :; }
unpack() { for tool in %s; do ln -s "$BIN/true" "$BIN/$tool"; done; }
source "$FOLDER/mirror"
case $* in
*" update") update ;;
*" --download-only "*) download ;;
*) unpack ;;
esac
"""
DNS = "W: Failed to fetch http://mirror.example/InRelease  Temporary failure resolving 'mirror'"
ABSENT = "E: Unable to locate package slurm-wlm"


class Machine(ScriptShims):
    """Root on a Debian without Slurm whose mirrors have it; a test takes away what it is about."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.policy = folder / "policy-rc.d"
        self.environment["POLICY_RC_D"] = str(self.policy)
        self.environment["SLURM_RETRY_PAUSE_SECONDS"] = "0"
        self.add("id", "echo 0")
        self.add("unshare")
        self.add("true")
        self.add("apt-get", APT_GET % " ".join(TOOLS))
        self.mirror("")

    def mirror(self, text: str) -> None:
        """What apt-get does otherwise than in the good case."""
        (self.folder / "mirror").write_text(text + "\n")

    def install(self, **environment: str) -> tuple[int, str]:
        """Run the script."""
        return self.run(SCRIPT, **environment)

    def asked(self) -> list[str]:
        """``update``, ``download`` or ``unpack`` for every call of apt-get."""
        return [
            "update" if call.endswith(" update")
            else "download" if "--download-only" in call
            else "unpack"
            for call in self.calls("apt-get")
        ]  # fmt: skip


@pytest.fixture
def machine(tmp_path):
    """A machine on which everything works."""
    return Machine(tmp_path)


def last_line(output: str) -> str:
    return output.rstrip().splitlines()[-1]


def test_knows_every_command_that_the_suite_runs():
    files = [*(ROOT / "tests" / "slurm").glob("*.py"), *(ROOT / "launch").iterdir()]
    words = set(re.findall(r"[a-z]+", " ".join(p.read_text() for p in files)))
    commands = "salloc sacct sacctmgr sattach sbatch sbcast scancel scontrol sdiag sinfo sprio"
    commands += " squeue sreport srun sstat strigger slurmctld slurmd slurmdbd slurmrestd munged"
    # slurmdbd is named by a comment that says it is left out.
    assert words & set(commands.split()) - {"slurmdbd"} == set(TOOLS)


def test_installs_without_starting_a_service(machine):
    machine.mirror(
        'eval "good_$(declare -f unpack)"\n'
        'unpack() { good_unpack; status=0; "$POLICY_RC_D" || status=$?\n'
        'echo "$status $DEBIAN_FRONTEND" >"$FOLDER/during"; }'
    )
    code, output = machine.install()
    assert code == 0, output
    limits = (
        "-qq -y -o Acquire::Retries=3 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 "
        "-o DPkg::Lock::Timeout=120"
    )
    assert machine.calls("apt-get") == [
        f"{limits} update",
        f"{limits} install --download-only --no-install-recommends slurm-wlm munge",
        f"{limits} install --no-install-recommends slurm-wlm munge",
    ]
    assert (machine.folder / "during").read_text() == "101 noninteractive\n"
    assert not machine.policy.exists()
    assert machine.calls("slurmd") == [] and machine.calls("true") == ["-V"]


@pytest.mark.parametrize(("mirror", "expected"), [("", 0), ("unpack() { exit 100; }", WRONG)])
def test_a_policy_that_is_there_stays(machine, mirror, expected):
    machine.policy.write_text("#!/bin/sh\nexit 0\n")
    machine.policy.chmod(0o700)
    machine.mirror(mirror)
    code, output = machine.install()
    assert code == expected and f"{machine.policy} is there and stays" in output
    assert machine.policy.read_text() == "#!/bin/sh\nexit 0\n"
    assert machine.policy.stat().st_mode & 0o777 == 0o700


def test_a_second_time_there_is_nothing_to_do(machine):
    machine.install()
    before = machine.calls("apt-get")
    code, output = machine.install()
    assert code == 0 and "here already" in output
    assert machine.calls("apt-get") == before


def test_one_missing_command_is_not_already_installed(machine):
    for tool in TOOLS[1:]:
        machine.add(tool)
    machine.mirror('unpack() { ln -s "$BIN/true" "$BIN/slurmctld"; }')
    code, _ = machine.install()
    assert code == 0 and machine.asked() == ["update", "download", "unpack"]


def test_no_apt_get(machine):
    (machine.bin / "apt-get").unlink()
    code, output = machine.install()
    assert code == CANNOT
    assert last_line(output).startswith("cannot have Slurm here: no apt-get, and slurmctld slurmd")


@pytest.mark.parametrize("sudo", [None, "echo 'sudo: a password is required' >&2; exit 1"])
def test_not_root_and_no_way_to_be(machine, sudo):
    machine.add("id", "echo 1000")
    if sudo is not None:
        machine.add("sudo", sudo)
    code, output = machine.install()
    assert code == CANNOT and machine.asked() == []
    assert "not root, and no sudo without a password; run: sudo " in last_line(output)


def test_sudo_without_a_password(machine):
    machine.add("id", "if [[ -e $FOLDER/root ]]; then echo 0; else echo 1000; fi")
    machine.add("sudo", '[[ $2 == true ]] || { touch "$FOLDER/root"; exec "${@:3}"; }')
    code, output = machine.install()
    assert code == 0 and machine.asked() == ["update", "download", "unpack"], output
    trial, call = machine.calls("sudo")
    assert trial == "-n true"
    assert call.startswith("-n --preserve-env=http_proxy,") and call.endswith(f" bash {SCRIPT}")


def test_no_mount_namespaces(machine):
    """Nothing is installed for tests that could not run; Slurm that is there changes nothing."""
    machine.install()
    before = machine.calls("apt-get")
    machine.add("unshare", "exit 1")
    code, output = machine.install()
    assert code == CANNOT and "no mount namespaces" in last_line(output)
    assert machine.calls("apt-get") == before


def test_mirrors_that_do_not_answer_are_tried_three_times(machine):
    # A failed update is a warning to apt-get; its lists may be older than the outage, or absent.
    machine.mirror(f'update() {{ echo "{DNS}" >&2; }}\ndownload() {{ echo "{ABSENT}"; exit 100; }}')
    code, output = machine.install()
    assert code == CANNOT and machine.asked() == ["update", "download"] * 3
    assert last_line(output) == f"cannot have Slurm here: package mirrors do not answer: {DNS}"
    assert not machine.policy.exists()


def test_a_mirror_that_answers_the_second_time(machine):
    machine.mirror(
        'download() { [[ -e $FOLDER/once ]] || { touch "$FOLDER/once"; '
        'echo "E: Failed to fetch http://mirror.example/slurmd.deb  404  Not Found"; exit 100; }; }'
    )
    code, output = machine.install()
    assert code == 0 and machine.asked() == [*["update", "download"] * 2, "unpack"], output
    assert "attempt 1 of 3" in output


def test_another_mirror_may_be_gone(machine):
    machine.mirror(f'update() {{ echo "{DNS}" >&2; exit 100; }}')
    code, output = machine.install()
    assert code == 0 and machine.asked() == ["update", "download", "unpack"], output


def test_sources_without_slurm(machine):
    machine.mirror(f'download() {{ echo "{ABSENT}" >&2; exit 100; }}')
    code, output = machine.install()
    assert code == CANNOT and machine.asked() == ["update", "download"]
    assert "package sources lack slurm-wlm munge" in last_line(output)


def test_a_network_that_swallows_everything_ends_at_the_limit(machine):
    machine.mirror("update() { exec sleep 60; }\ndownload() { exec sleep 60; }")
    code, output = machine.install(SLURM_FETCH_SECONDS="1")
    assert code == CANNOT and "no packages after 1 s" in last_line(output)


@pytest.mark.parametrize(
    ("mirror", "asked", "words"),
    [
        ('download() { echo "E: You don\'t have enough free space"; exit 100; }',
         ["update", "download"], "exit code 100): E: You don't have enough free space"),
        # Not unknown: the update that would have made it known went wrong.
        (f'update() {{ exit 100; }}\ndownload() {{ echo "{ABSENT}"; exit 100; }}',
         ["update", "download"], ABSENT),
        ('download() { echo "E: Could not get lock, held by process 7"; exit 100; }',
         ["update", "download"] * 3, "held by process 7"),
        ('unpack() { echo "dpkg: error processing munge"; exit 100; }',
         ["update", "download", "unpack"], "apt-get install ended with exit code 100"),
        ("unpack() { :; }", ["update", "download", "unpack"], "not found: slurmctld slurmd"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_no_excuse(machine, mirror, asked, words):
    """Installing was possible, so its failure is an error and not a reason to do without."""
    machine.mirror(mirror)
    code, output = machine.install()
    assert code == WRONG and machine.asked() == asked, output
    assert last_line(output).startswith("installing Slurm went wrong: ") and words in output
    assert not machine.policy.exists()


def test_an_installation_that_hangs_ends_at_its_limit(machine):
    machine.mirror("unpack() { exec sleep 60; }")
    code, output = machine.install(SLURM_UNPACK_SECONDS="1")
    assert code == WRONG and "exit code 124 (124: after 1 s)" in last_line(output)
    assert not machine.policy.exists()
