#!/usr/bin/env bash
# Builds what the tests of Kubernetes run, from the modules in kubernetes/integration/parts: the
# control plane (etcd, API server, controller manager, scheduler), kubectl and KWOK; with --node also
# kubelet, kube-proxy and containerd. The first time takes about 8 minutes on two cores; a binary
# that is there is not built again. Prints the directory. With --oldest, this is its directory
# "oldest", in which all that Kubernetes releases together is of the oldest version that is promised.
#
# It is cache/kubernetes/HASH, HASH being that of the modules' versions and of this script, so that
# other versions get another directory. KUBEVIRT_DISK_KUBERNETES names another place than
# cache/kubernetes, which several checkouts can share.
set -euo pipefail
cd "$(dirname "$0")/.."

go=${GO:-go}
node='' oldest=''
case ${1:-} in
--node) node=1 ;;
--oldest) node=1 oldest=1 ;;
'') ;;
*)
	echo "usage: $0 [--node|--oldest]" >&2
	exit 2
	;;
esac

export LC_ALL=C # the order of the files below
parts=$PWD/kubernetes/integration/parts
# kubernetes/integration/plane computes the same.
hash=$(cat "$parts"/*/go.mod "$parts"/*/go.sum scripts/build-kubernetes.sh | sha256sum | cut -c 1-16)
out=${KUBEVIRT_DISK_KUBERNETES:-$PWD/cache/kubernetes}/$hash
mkdir -p "$out"
if [ -n "$oldest" ]; then
	# Tests that need it wait for this lock, also while the next one is another build's.
	mkdir -p "$out/oldest"
	exec 8>"$out/oldest/lock"
	flock 8
	echo "build-kubernetes: the oldest Kubernetes" >&2
fi
# Two at once would build everything twice.
exec 9>"$out/lock"
flock 9

export CGO_ENABLED=0

# build PART NAME PACKAGE [FLAG...]
build() {
	local part=$1 name=$2 package=$3 try
	shift 3
	[ ! -x "$out/$name" ] || return 0
	echo "build-kubernetes: $name" >&2
	for try in 1 2 3; do # a module proxy may fail
		if "$go" build -C "$parts/$part" -trimpath "$@" -o "$out/$name.new" "$package"; then
			mv "$out/$name.new" "$out/$name"
			return
		fi
		echo "build-kubernetes: $name failed, try $try of 3" >&2
		sleep 2
	done
	return 1
}

# about PART: flags that tell the programs of a part which version they are.
about() {
	local version major minor to=k8s.io/component-base/version
	version=$("$go" list -C "$parts/$1" -m -f '{{.Version}}' k8s.io/kubernetes)
	IFS=. read -r major minor _ <<<"${version#v}"
	echo "-s -w -X $to.gitVersion=$version -X $to.gitMajor=$major -X $to.gitMinor=$minor -X $to.gitTreeState=clean"
}
about=$(about kubernetes)

# What takes longest comes first, so that a failure shows early.
for command in kube-apiserver kube-controller-manager kube-scheduler kubectl; do
	build kubernetes $command k8s.io/kubernetes/cmd/$command -ldflags "$about"
done
build kubernetes etcd go.etcd.io/etcd/server/v3 -ldflags '-s -w'
build kwok kwok sigs.k8s.io/kwok/cmd/kwok -ldflags '-s -w'
if [ ! -e "$out/kwok-stages.yaml" ]; then
	# What KWOK does with nodes and pods: without these it does nothing.
	stages=$("$go" list -C "$parts/kwok" -m -f '{{.Dir}}' sigs.k8s.io/kwok)/kustomize/stage
	for file in "$stages"/node/fast/node-initialize.yaml "$stages"/node/heartbeat-with-lease/node-heartbeat-with-lease.yaml \
		"$stages"/pod/fast/pod-{ready,complete,delete}.yaml; do
		echo ---
		cat "$file"
	done >"$out/kwok-stages.new"
	mv "$out/kwok-stages.new" "$out/kwok-stages.yaml"
fi

if [ -n "$node" ]; then
	for command in kubelet kube-proxy; do
		build kubernetes $command k8s.io/kubernetes/cmd/$command -ldflags "$about"
	done
	runtime=$("$go" list -C "$parts/containerd" -m -f '{{.Version}}' github.com/containerd/containerd/v2)
	for command in containerd containerd-shim-runc-v2 ctr; do
		build containerd $command github.com/containerd/containerd/v2/cmd/$command \
			-tags 'no_btrfs no_devmapper no_zfs' \
			-ldflags "-s -w -X github.com/containerd/containerd/v2/version.Version=$runtime"
	done
fi
if [ -n "$oldest" ]; then
	about=$(about oldest)
	for command in kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy; do
		build oldest oldest/$command k8s.io/kubernetes/cmd/$command -ldflags "$about"
	done
	for file in etcd kubectl kwok kwok-stages.yaml containerd containerd-shim-runc-v2 ctr; do
		ln -sf "../$file" "$out/oldest/$file"
	done
	out+=/oldest
fi
echo "$out"
