#!/usr/bin/env bash
# Build the Dockerfile on a substitute base and use it as its user: the doctor, then the quick start.
# test_image.sh RESULT_JSON
#
# The base is Debian with its Python, and torch from PyPI at the tested version; it is kept between
# calls as localhost/substitute-base (take it away with `buildah rmi`). No daemon is needed.
# Root, buildah, debootstrap, 25 GB of disk; MIRROR names another Debian mirror than the default one.
set -euo pipefail
cd "$(dirname "$0")/.."
result=$1 started=$SECONDS
dockerfile=$(sha256sum Dockerfile) commit=$(git describe --always --dirty --abbrev=40 --match '')
base=localhost/substitute-base image=localhost/megatron-patch:test
mounts=(--volume /etc/ssl/certs:/etc/ssl/certs:ro) # a registry may stand behind an own authority
export BUILDAH_ISOLATION=chroot

for tool in buildah debootstrap; do
  if [[ $(id -u) != 0 ]] || ! command -v "$tool" >/dev/null; then
    echo "needs root and $tool: sudo apt-get install buildah debootstrap" >&2
    exit 69
  fi
done

inside() {
  buildah run "${mounts[@]}" "$container" -- "$@"
}

remove() {
  [[ -z ${container:-} ]] || buildah rm "$container" >/dev/null
}
trap remove EXIT

if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
  container=$(buildah from scratch)
  debootstrap --variant=minbase \
    --include=ca-certificates,python3-dev,python3-venv,git,g++ \
    trixie "$(buildah mount "$container")" ${MIRROR:+"$MIRROR"}
  buildah umount "$container" >/dev/null
  inside python3 -m venv /opt/python
  buildah config --env PATH=/opt/python/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin "$container"
  mapfile -t pins < <(grep -E '^(torch|triton|numpy|setuptools)==' constraints.txt)
  inside python -m pip install --quiet --no-cache-dir "${pins[@]}"
  buildah commit --quiet --format docker --rm "$container" "$base" >/dev/null
  container=
fi

buildah bud --quiet --format docker "${mounts[@]}" --build-arg BASE="$base" \
  --build-arg APEX_REF= --build-arg TE_VERSION= \
  --build-arg SOURCE_COMMIT="$commit" --tag "$image" .
container=$(buildah from "$image")
log=$(mktemp)
inside id -un | tee "$log"
inside megatron-patch doctor | tee -a "$log"
inside bash /usr/share/megatron_patch/scripts/quickstart.sh | tee -a "$log"

said() {
  grep -oE -m 1 "$1" "$log" | tr -s ' '
}
cat >"$result" <<JSON
{
 "utc": "$(date --utc +%FT%TZ)",
 "commit": "$commit",
 "dockerfile": "${dockerfile%% *}",
 "base": "$(inside sed -n 's/^PRETTY_NAME="\(.*\)"/\1/p' /etc/os-release), $(said 'python +[0-9.]+'), $(said 'torch +[0-9][^ ]*')",
 "user": "$(head -n 1 "$log")",
 "doctor": "$(said 'everything required works')",
 "quickstart": "$(said 'loss fell .*')",
 "seconds": $((SECONDS - started))
}
JSON
