#!/usr/bin/env bash
# Builds a whole KubeVirt for the tests of a cluster: its programs, unmodified, from the module in
# integration/launcher, in a root file system with the libvirt and QEMU of Debian 13. It is an image
# by the names of all of KubeVirt's images. localhost/virt-launcher:bookworm is the launcher in a root
# of Debian 12. Prints the directory, which has
#
#   images.tar     the images, for `ctr images import`
#   operator.json  what installs KubeVirt's operator, made by KubeVirt's own code
#   virtctl        KubeVirt's client
#
# It is cache/kubevirt/HASH, HASH being that of the module and of this script: what is there is not
# built again. KUBEVIRT_DISK_KUBEVIRT names another place than cache/kubevirt, which several checkouts
# can share. It needs root, mmdebstrap, a C compiler and Debian's libvirt-dev. The first time takes
# some minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

# The first has the images that KubeVirt is installed with: Debian 13: libvirt 11.3, QEMU 10.0. Of each
# other one there is a launcher: Debian 12: libvirt 9.0, QEMU 7.2.
releases=(trixie bookworm)
packages=libvirt-daemon,libvirt-daemon-driver-qemu,libvirt-clients,qemu-system-x86,qemu-utils,seabios,nftables
packages+=,iproute2,procps,ethtool,util-linux,mount,xorriso,libcap2-bin,ca-certificates,e2fsprogs,passt
programs=(virt-operator virt-api virt-controller virt-handler virt-chroot virt-launcher virt-launcher-monitor
	virt-probe virt-tail virt-freezer)

go=${GO:-go}
module=$PWD/integration/launcher
# kubernetes/integration/kubevirt computes the same.
hash=$(cat "$module"/{go.mod,go.sum,operator/main.go} scripts/build-kubevirt.sh | sha256sum | cut -c 1-16)
out=${KUBEVIRT_DISK_KUBEVIRT:-$PWD/cache/kubevirt}/$hash
if [ -e "$out/images.tar" ]; then
	echo "$out"
	exit
fi
missing=()
for tool in mmdebstrap pkg-config setcap "${CC:-gcc}"; do
	command -v "$tool" >/dev/null || missing+=("$tool")
done
pkg-config --exists libvirt 2>/dev/null || missing+=(libvirt-dev)
[ "$(id -u)" = 0 ] || missing+=(root)
if [ ${#missing[@]} != 0 ]; then
	echo "build-kubevirt: not built, for want of: ${missing[*]}" >&2
	[ "${KUBEVIRT_DISK_REQUIRE_TOOLS:-}" != 1 ]
	exit
fi
mkdir -p "$out"
exec 9>"$out/lock" # two at once would build everything twice
flock 9
[ ! -e "$out/images.tar" ] || exec "$0"
work=$out/work
rm -rf "$work"
mkdir "$work"
kubevirt=$("$go" list -C "$module" -m -f '{{.Dir}}' kubevirt.io/kubevirt)
version=$("$go" list -C "$module" -m -f '{{.Version}}' kubevirt.io/kubevirt)

# KubeVirt v1.7.0 relies on an order of initialization that Go 1.26 does not choose: virt-handler would
# die of a metric that is nil. A package's variables are initialized in the order of its files, and
# this compiler gets one file last.
late=kubevirt.io/kubevirt/pkg/monitoring/metrics/virt-handler/domainstats
cat >"$work/compile" <<EOT
#!/bin/bash
tool=\$1 early=() last=()
shift
if [[ \$tool == */compile && " \$* " == *" -p $late "* ]]; then
	for argument; do
		case \$argument in */collector.go) last+=("\$argument") ;; *) early+=("\$argument") ;; esac
	done
	set -- "\${early[@]}" "\${last[@]}"
fi
exec "\$tool" "\$@"
EOT
chmod +x "$work/compile"

# build NAME PACKAGE [FLAG...]: with the flags of build-launcher.sh, so that packages are compiled once.
export CGO_ENABLED=1
about=kubevirt.io/client-go/version
about="-s -w -X $about.gitVersion=$version -X $about.gitCommit=0 -X $about.buildDate=1970-01-01T00:00:00Z -X $about.gitTreeState=clean"
build() {
	local name=$1 package=$2 try
	shift 2
	echo "build-kubevirt: $name" >&2
	for try in 1 2 3; do # a module proxy may fail
		if "$go" build -C "$module" -trimpath -gcflags 'all=-N -l -dwarf=false' "$@" -ldflags "$about" \
			-o "$work/$name" "$package"; then
			return
		fi
		echo "build-kubevirt: $name failed, try $try of 3" >&2
		sleep 2
	done
	return 1
}
for name in "${programs[@]}" virtctl; do
	more=()
	# Another flag than elsewhere, so that this package is not taken from Go's cache.
	[ "$name" != virt-handler ] || more=(-toolexec "$work/compile" -gcflags "$late=-N -l -dwarf=false -c=1")
	build "$name" "kubevirt.io/kubevirt/cmd/$name" "${more[@]}"
done
build operator ./operator
"$work/operator" "$version" >"$out/operator.json"
"${CC:-gcc}" -static -O2 -o "$work/container-disk" "$kubevirt/cmd/container-disk-v2alpha/main.c"

# What KubeVirt's own images have besides Debian: a layer above each root.
above=$work/above
install -d "$above"/{usr/bin,usr/sbin,usr/libexec/kubevirt,home,var} "$above"/etc/libvirt/hooks
install -d -o 107 -g 107 "$above/home/qemu"
(cd "$work" && install -m 0755 -t "$above/usr/bin" "${programs[@]}" container-disk)
setcap cap_net_bind_service=+ep "$above/usr/bin/virt-launcher-monitor"
install -m 0755 "$kubevirt/cmd/virt-launcher/node-labeller/node-labeller.sh" "$above/usr/bin/"
install -m 0755 "$kubevirt/cmd/virt-launcher/qemu" "$above/etc/libvirt/hooks/qemu"
install -m 0644 "$kubevirt"/cmd/virt-launcher/{qemu,virtqemud}.conf "$above/etc/libvirt/"
echo 'log_outputs = "3:stderr"' >"$above/etc/libvirt/virtlogd.conf"
# virt-handler opens /proc/PID/root/var/run/...: an absolute link would lead into its own root.
ln -s ../run "$above/var/run"
# KubeVirt starts virtqemud. Debian has one daemon for all drivers, here with QEMU's alone. What it is
# called decides where it has its socket and its configuration.
ln -s /usr/sbin/libvirtd "$above/usr/libexec/kubevirt/virtqemud"
cat >"$above/usr/sbin/virtqemud" <<'EOT'
#!/bin/sh
mkdir -p /run/libvirt
ln -sfn libvirt-sock /run/libvirt/virtqemud-sock
exec /usr/libexec/kubevirt/virtqemud "$@"
EOT
chmod 0755 "$above/usr/sbin/virtqemud"

# An OCI layout. Nothing is compressed.
blobs=$work/layout/blobs/sha256
mkdir -p "$blobs"
blob() { # blob FILE: moves it to the blobs and prints its digest and size, as JSON
	local digest size
	digest=$(sha256sum <"$1" | cut -d ' ' -f 1)
	size=$(stat -c %s "$1")
	mv "$1" "$blobs/$digest"
	echo "\"digest\": \"sha256:$digest\", \"size\": $size"
}
layer() { # layer DIRECTORY: removes it, and prints digest and size of its archive
	tar --create --file "$work/layer" --directory "$1" --numeric-owner --xattrs --xattrs-include='security.capability' .
	rm -rf "$1"
	blob "$work/layer"
}
digest() { # digest BLOB: the digest in what blob has printed
	local digest=${1#*: }
	echo "${digest%%,*}"
}
type=application/vnd.oci.image
manifests=
image() { # image PROGRAM USER TAG ROOT: adds localhost/PROGRAM:TAG
	local config
	cat >"$work/config" <<-EOT
		{"architecture": "amd64", "os": "linux",
		 "rootfs": {"type": "layers", "diff_ids": [$(digest "$4"), $(digest "$above")]},
		 "config": {"User": "$2", "Entrypoint": ["/usr/bin/$1"],
		            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]}}
	EOT
	config=$(blob "$work/config")
	cat >"$work/manifest" <<-EOT
		{"schemaVersion": 2, "mediaType": "$type.manifest.v1+json",
		 "config": {"mediaType": "$type.config.v1+json", $config},
		 "layers": [{"mediaType": "$type.layer.v1.tar", $4}, {"mediaType": "$type.layer.v1.tar", $above}]}
	EOT
	manifests+="${manifests:+, }{\"mediaType\": \"$type.manifest.v1+json\", $(blob "$work/manifest"),
		\"annotations\": {\"io.containerd.image.name\": \"localhost/$1:$3\"}}"
}
above=$(layer "$above")
for release in "${releases[@]}"; do
	echo "build-kubevirt: a root with Debian $release" >&2
	mmdebstrap --quiet --variant=essential --include="$packages" --aptopt='APT::Install-Recommends "false"' \
		--aptopt='Acquire::Retries "3"' --dpkgopt='path-exclude=/usr/share/doc/*' \
		--dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
		"$release" "$work/root" "$(scripts/debian-mirror.sh)"
	rm -rf "$work"/root/var/lib/apt/lists/* "$work"/root/var/cache/apt/*
	echo 'qemu:x:107:107::/home/qemu:/bin/bash' >>"$work/root/etc/passwd"
	echo 'qemu:x:107:' >>"$work/root/etc/group"
	root=$(layer "$work/root")
	if [ "$release" != "${releases[0]}" ]; then
		image virt-launcher 0 "$release" "$root"
		continue
	fi
	for name in virt-operator virt-api virt-controller; do image "$name" 1001 "$version" "$root"; done
	for name in virt-handler virt-launcher; do image "$name" 0 "$version" "$root"; done
done
echo "{\"schemaVersion\": 2, \"manifests\": [$manifests]}" >"$work/layout/index.json"
echo '{"imageLayoutVersion": "1.0.0"}' >"$work/layout/oci-layout"
mv "$work/virtctl" "$out/virtctl"
tar --create --file "$out/images.new" --directory "$work/layout" oci-layout index.json blobs
rm -rf "$work"
mv "$out/images.new" "$out/images.tar"
echo "$out"
