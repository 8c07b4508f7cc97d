#!/usr/bin/env bash
# Builds the base image with buildah: a manifest list with a static binary each for linux/amd64 and
# linux/arm64. Prints digests and sizes. The same binaries, version and time give the same digests.
#
# VERSION and REVISION become labels. SOURCE_DATE_EPOCH is the time of every file and of the image;
# the default is the time of the last commit. buildah decides where images are kept:
# CONTAINERS_STORAGE_CONF names another place.
#
# With BOOT it is kubevirt.io:adapter, which also has what boots container images: BOOT/ARCH has
# vmlinuz and initrd, KERNELS/ARCH what scripts/fetch-kernel.sh has left.
set -euo pipefail

[ $# = 3 ] || {
	echo "usage: $0 IMAGE AMD64-BINARY ARM64-BINARY" >&2
	exit 2
}
image=$1
declare -A binary=([amd64]=$(realpath "$2") [arm64]=$(realpath "$3"))
boot=${BOOT:+$(realpath "$BOOT")}
kernels=${KERNELS:+$(realpath "$KERNELS")}
cd "$(dirname "$0")/.."
command -v buildah >/dev/null || {
	echo "build-image: buildah is not installed (Debian: apt-get install buildah)" >&2
	exit 1
}

limit=$((25 << 20)) # the largest unpacked image, in bytes
containerfile=Containerfile
if [ -n "$boot" ]; then
	limit=$((80 << 20)) # arm64's kernel is not compressed
	containerfile=Containerfile.adapter
fi
epoch=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
unset SOURCE_DATE_EPOCH # buildah 1.43 would take it, and refuses it beside --timestamp
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
scripts/licenses.sh . ./cmd/kubevirt-disk ${boot:+./cmd/kubevirt-disk-init} >"$work/LICENSES"

# lay_out ARCH makes the trees that the Containerfile copies. It sets every mode, so that no umask
# decides.
lay_out() {
	local root=$work/linux-$1/root state=$work/linux-$1/state
	install -d -m 0755 "$root" "$root/bin" "$root/disk" "$root/var" "$root/var/lib" "$state"
	install -d -m 1777 "$root/tmp"
	install -m 0755 "${binary[$1]}" "$root/kubevirt-disk"
	ln -s kubevirt-disk "$root/entry-point.sh"
	ln -s ../kubevirt-disk "$root/bin/kubevirt-disk"
	ln -s ../kubevirt-disk "$root/bin/cat"
	install -d -m 1777 "$state/kubevirt-disk"
	install -d -m 0755 "$root/usr" "$root/usr/share" "$root/usr/share/doc"
	install -m 0644 "$work/LICENSES" "$root/usr/share/doc/LICENSES"
	[ -z "$boot" ] || lay_out_boot "$1" "$root"
}

# lay_out_boot adds the files that boot container images. The kernel is GPL-2, so its licence and
# the place of its source come with it.
lay_out_boot() { # lay_out_boot ARCH ROOT
	local copyright=("$kernels/$1"/root/usr/share/doc/linux-image-*/copyright)
	install -d -m 0755 "$2/boot" "$2/usr/share/doc/linux"
	install -m 0644 "$boot/$1/vmlinuz" "$boot/$1/initrd" "$2/boot/"
	install -m 0644 "${copyright[0]}" "$2/usr/share/doc/linux/copyright"
	install -m 0644 "$kernels/$1/source" "$2/usr/share/doc/linux/SOURCE"
}

# Only the docker format has a HEALTHCHECK.
build() { # build ARCH: prints the id of the image
	buildah build --quiet --platform "linux/$1" --format docker --timestamp "$epoch" --identity-label=false --no-cache \
		--build-arg "CREATED=$(date -u -d "@$epoch" +%Y-%m-%dT%H:%M:%SZ)" \
		--build-arg "REVISION=${REVISION:-unknown}" --build-arg "VERSION=${VERSION:-dev}" \
		--file "$containerfile" "$work"
}

# In the docker format, buildah 1.39 writes the random name of its build container into the image,
# and 1.43 does not. This removes it, leaves the image in a directory, and prints its id.
normalise() { # normalise ARCH ID DIRECTORY
	local id=$2 dir=$3 size digest
	buildah push --quiet "$id" "dir:$dir"
	sed -E 's/"container":"[0-9a-f]*",//; s/"Hostname":"[0-9a-f]*"/"Hostname":""/g' "$dir/$id" >"$dir/config"
	size=$(stat -c %s "$dir/config")
	digest=$(sha256sum <"$dir/config" | cut -d ' ' -f 1)
	mv "$dir/config" "$dir/$digest"
	sed -i -E "s/\"size\":[0-9]+,\"digest\":\"sha256:$id\"/\"size\":$size,\"digest\":\"sha256:$digest\"/" "$dir/manifest.json"
	buildah rmi "$id" >/dev/null
	buildah pull --quiet --platform "linux/$1" "dir:$dir"
}

# report prints the digest of the image in a directory, and its size packed and unpacked.
report() { # report ARCH DIRECTORY
	local digest layers packed=0 unpacked=0
	digest=$(sha256sum <"$2/manifest.json" | cut -d ' ' -f 1)
	mapfile -t layers < <(sed -E 's/.*"layers"://' "$2/manifest.json" | grep -oE 'sha256:[0-9a-f]{64}' | cut -d : -f 2)
	for layer in "${layers[@]}"; do
		packed=$((packed + $(stat -c %s "$2/$layer")))
		unpacked=$((unpacked + $(gzip -dc <"$2/$layer" | wc -c)))
	done
	printf 'linux/%-5s sha256:%s  %s unpacked, %s in a registry\n' "$1" "$digest" \
		"$(numfmt --to=iec-i --suffix=B --format=%.1f "$unpacked")" "$(numfmt --to=iec-i --suffix=B --format=%.1f "$packed")"
	if [ "$unpacked" -ge "$limit" ]; then
		echo "build-image: linux/$1 is larger than $limit bytes" >&2
		return 1
	fi
}

# members prints the ids of the images in the list of that name, if there is one.
members() {
	local digests
	digests=$(buildah manifest inspect "$image" 2>/dev/null | grep -oE 'sha256:[0-9a-f]{64}') || return 0
	buildah images --all --no-trunc --format '{{.Digest}} {{.ID}}' | grep -F "$digests" | sed 's/.* sha256://'
}

# A manifest list only grows, so first remove the one of the last build.
mapfile -t former < <(members)
buildah manifest rm "$image" >/dev/null 2>&1 || buildah rmi "$image" >/dev/null 2>&1 || true
buildah manifest create "$image" >/dev/null
for arch in amd64 arm64; do
	lay_out "$arch"
	id=$(build "$arch")
	id=$(normalise "$arch" "$id" "$work/image-$arch")
	buildah manifest add --os linux --arch "$arch" "$image" "$id" >/dev/null
  # Without a name of its own, `podman image prune` could remove the image from under the list, and
  # so could `podman rmi` of an image that was made from it.
	buildah tag "$id" "$image-$arch"
	report "$arch" "$work/image-$arch"
done
# The images of the former list have no name, so nobody else would remove them. One stays if a
# user's image was made from it.
for id in "${former[@]}"; do
	grep -qx "$id" <(members) || buildah rmi "$id" >/dev/null 2>&1 || true
done
echo "built $image: FROM $image in a Dockerfile on this machine, or push it with"
echo "  buildah manifest push --all $image docker://REGISTRY/$image"
