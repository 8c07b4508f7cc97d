#!/usr/bin/env bash
# The first process of a node's namespaces: containerd, kubelet and kube-proxy. The first node also
# has the control plane. Everything that it starts and mounts ends with it. It waits forever;
# $RUN/ready exists when pods can be made.
#
# NODE is the node's name, node1 for the first one, and NET the first three numbers of its
# addresses. RUN is a directory of this node alone, PLANE the first node's RUN. BIN has the
# binaries, IMAGES has archives of images. CGROUP is where the node's cgroups are. GATES are feature
# gates, of which there may be none.
set -euo pipefail
cd "$RUN"
export PATH=$BIN:$PATH
address=$NET.1 # of the bridge, which is the node's
findmnt -n -o TARGET -t cgroup,cgroup2 | while read -r hierarchy; do
	mkdir -p "$hierarchy$CGROUP"
	if [ -e "$hierarchy/cpuset.cpus" ]; then # a new cpuset of version 1 is empty
		cat "$hierarchy/cpuset.cpus" >"$hierarchy$CGROUP/cpuset.cpus"
		cat "$hierarchy/cpuset.mems" >"$hierarchy$CGROUP/cpuset.mems"
	fi
done

# The machine's settings stay as they are: they are read-only here, except for the network's.
mount --bind /proc/sys /proc/sys
mount --bind /proc/sys/net /proc/sys/net
mount -o remount,bind,ro /proc/sys
# The kubelet insists on these values. It reads them from files that are mounted over the real ones.
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1; do
	name=${setting%=*}
	echo "${setting#*=}" >"sysctl.${name##*/}"
	mount --bind "sysctl.${name##*/}" "/proc/sys/$name"
done
mkdir -p kubelet log/var certs cni kubevirt labeller dev
mount -t tmpfs tmpfs /run
mount --make-rshared /run
mount -t tmpfs tmpfs /var/lib/cni
mount --bind log/var /var/log
mount --bind kubelet /var/lib/kubelet
mount --make-rshared /var/lib/kubelet
mount --bind kubevirt /var/lib/kubevirt
mount --bind labeller /var/lib/kubevirt-node-labeller

device() { mknod -m "$4" "dev/$1" c "$2" "$3"; }
mount -t tmpfs -o mode=755 tmpfs dev
mkdir dev/net dev/pts dev/mqueue dev/mapper
mkdir -m 1777 dev/shm
device null 1 3 666
device zero 1 5 666
device full 1 7 666
device random 1 8 666
device urandom 1 9 666
device kmsg 1 11 600 # the kubelet reads it
device tty 5 0 666
device console 5 1 600
device net/tun 10 200 666
device fuse 10 229 666
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
for i in 0/stdin 1/stdout 2/stderr; do ln -s "/proc/self/fd/${i%/*}" "dev/${i#*/}"; done
mount --rbind dev /dev

ip link set lo up
ip link add cni0 type bridge
ip addr add "$address/24" dev cni0
ip link set cni0 up
ip route add 10.96.0.0/16 dev cni0 # addresses of services
echo 1 >/proc/sys/net/ipv4/ip_forward

credentials() {
	authority() { # authority NAME SUBJECT
		openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout "certs/$1.key" -out "certs/$1.crt" -subj "$2"
	}
	key() { # key NAME SUBJECT [AUTHORITY]: a certificate for servers and clients
		openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout "certs/$1.key" -out "certs/$1.csr" -subj "$2"
		openssl x509 -req -in "certs/$1.csr" -CA "certs/${3:-ca}.crt" -CAkey "certs/${3:-ca}.key" -CAcreateserial -out "certs/$1.crt" \
			-extfile <(echo "subjectAltName=IP:127.0.0.1,IP:10.244.0.1,IP:10.244.1.1,IP:10.96.0.1,DNS:node1,DNS:quay.io,DNS:registry.example.com")
	}
	{
		authority ca /CN=ca
		authority front /CN=front-proxy-ca # of requests that the API server passes on
		key server /CN=kube-apiserver
		key kubelet /CN=kubelet
		key client /CN=apiserver/O=system:masters
		key proxy-client /CN=front-proxy-client front
		openssl ecparam -name prime256v1 -genkey -noout -out certs/accounts.key
		openssl ec -in certs/accounts.key -pubout -out certs/accounts.pub
	} 2>log/openssl.log

	user() { # user NAME USER GROUP
		local token
		token=$(openssl rand -hex 16)
		echo "$token,$2,$1,\"$3\"" >>tokens.csv
		cat >"$1.kubeconfig" <<-CONFIG
			apiVersion: v1
			kind: Config
			clusters: [{name: node, cluster: {server: "https://$address:6443", certificate-authority: $RUN/certs/ca.crt}}]
			users: [{name: user, user: {token: $token}}]
			contexts: [{name: node, context: {cluster: node, user: user}}]
			current-context: node
		CONFIG
	}
	user admin admin system:masters
	user manager system:kube-controller-manager ''
	user scheduler system:kube-scheduler ''
	user node1 system:node:node1 system:nodes
	user node2 system:node:node2 system:nodes
}

# retry COMMAND... repeats a command until it succeeds. Callers that wait for this node set the
# limit.
retry() {
	until "$@" >/dev/null 2>&1; do sleep 0.3; done
}

if [ "$NODE" = node1 ]; then credentials; fi
export KUBECONFIG=$PLANE/admin.kubeconfig

cat >containerd.toml <<CONFIG
version = 3
root = "$RUN/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.nri.v1.nri"]
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "localhost/pause:1"
[plugins."io.containerd.cri.v1.runtime"]
  # A process of a namespace may not lower the score of the machine's.
  restrict_oom_score_adj = true
  disable_apparmor = true
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["/usr/lib/cni"]
  conf_dir = "$RUN/cni"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
CONFIG
cat >cni/10-bridge.conflist <<CONFIG
{"cniVersion": "0.4.0", "name": "node", "plugins": [
 {"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
  "ipam": {"type": "host-local", "dataDir": "/run/cni", "routes": [{"dst": "0.0.0.0/0"}],
   "ranges": [[{"subnet": "$NET.0/24", "rangeStart": "$NET.10"}]]}},
 {"type": "portmap", "capabilities": {"portMappings": true}}]}
CONFIG
cat >kubelet.yaml <<CONFIG
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: $address
tlsCertFile: $PLANE/certs/kubelet.crt
tlsPrivateKeyFile: $PLANE/certs/kubelet.key
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: false}
  x509: {clientCAFile: $PLANE/certs/ca.crt}
authorization: {mode: AlwaysAllow}
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
cgroupDriver: cgroupfs
cgroupRoot: $CGROUP
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
resolvConf: ""
clusterDNS: [10.244.0.1]
clusterDomain: cluster.local
protectKernelDefaults: true
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%}
volumePluginDir: /var/lib/kubelet/volumeplugins
CONFIG
cat >proxy.yaml <<CONFIG
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: iptables
clientConnection: {kubeconfig: $KUBECONFIG}
hostnameOverride: $NODE
clusterCIDR: 10.244.0.0/16
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
metricsBindAddress: 127.0.0.1:10249
healthzBindAddress: 127.0.0.1:10256
CONFIG

control_plane() {
	etcd --data-dir etcd --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
		--listen-peer-urls http://127.0.0.1:0 --unsafe-no-fsync --log-level warn >log/etcd.log 2>&1 &
	kube-apiserver --etcd-servers http://127.0.0.1:2379 --secure-port 6443 --bind-address 0.0.0.0 \
		--advertise-address "$address" \
		--tls-cert-file certs/server.crt --tls-private-key-file certs/server.key --token-auth-file tokens.csv \
		--client-ca-file certs/ca.crt --requestheader-client-ca-file certs/front.crt \
		--requestheader-allowed-names front-proxy-client --requestheader-username-headers X-Remote-User \
		--requestheader-group-headers X-Remote-Group --requestheader-extra-headers-prefix X-Remote-Extra- \
		--proxy-client-cert-file certs/proxy-client.crt --proxy-client-key-file certs/proxy-client.key \
		--service-account-issuer https://kubernetes.default.svc --service-account-key-file certs/accounts.pub \
		--service-account-signing-key-file certs/accounts.key --authorization-mode Node,RBAC \
		--service-cluster-ip-range 10.96.0.0/16 --enable-admission-plugins NodeRestriction --allow-privileged \
		--kubelet-client-certificate certs/client.crt --kubelet-client-key certs/client.key \
		--feature-gates "$GATES" \
		--kubelet-certificate-authority certs/ca.crt --kubelet-preferred-address-types InternalIP >log/kube-apiserver.log 2>&1 &
	retry kubectl get --raw /readyz
	kube-controller-manager --kubeconfig manager.kubeconfig --authentication-kubeconfig manager.kubeconfig \
		--authorization-kubeconfig manager.kubeconfig --service-account-private-key-file certs/accounts.key \
		--root-ca-file certs/ca.crt --use-service-account-credentials --leader-elect=false --cert-dir certs/manager \
		--node-monitor-period 1s --bind-address 127.0.0.1 >log/kube-controller-manager.log 2>&1 &
	kube-scheduler --kubeconfig scheduler.kubeconfig --authentication-kubeconfig scheduler.kubeconfig \
		--authorization-kubeconfig scheduler.kubeconfig --leader-elect=false --cert-dir certs/scheduler \
		--bind-address 127.0.0.1 >log/kube-scheduler.log 2>&1 &
}

# names answers for the names of services, in the place of CoreDNS.
names() {
	local list='{{range .items}}{{if ne .spec.clusterIP "None"}}{{.spec.clusterIP}} {{.metadata.name}}.{{.metadata.namespace}}.svc'
	list+=' {{.metadata.name}}.{{.metadata.namespace}}.svc.cluster.local{{"\n"}}{{end}}{{end}}'
	touch hosts
	dnsmasq --no-daemon --no-resolv --no-hosts --addn-hosts="$RUN/hosts" --local=/#/ --bind-interfaces \
		--listen-address="$address" --user=root --pid-file= >log/dns.log 2>&1 &
	local server=$!
	while sleep 1; do
		kubectl get services -A --watch -o name 2>/dev/null | while read -r _; do
			kubectl get services -A -o go-template="$list" >hosts.new 2>/dev/null || continue
			if ! cmp -s hosts hosts.new; then
				mv hosts.new hosts
				kill -HUP $server
			fi
		done
	done &
}

containerd --config containerd.toml >log/containerd.log 2>&1 &
(
	retry ctr version
	for archive in "$IMAGES"/*.tar; do
		ctr -n k8s.io images import --snapshotter overlayfs "$archive"
	done
	touch imported
) >log/images.log 2>&1 &
if [ "$NODE" = node1 ]; then control_plane; fi
retry test -e imported
while :; do # a test may kill it
	kubelet --config kubelet.yaml --feature-gates "$GATES" --kubeconfig "$PLANE/$NODE.kubeconfig" --hostname-override "$NODE" --node-ip "$address" >>log/kubelet.log 2>&1 &
	echo $! >kubelet.pid
	wait $! || sleep 1
done &
# It ends when the address of its node becomes known.
while sleep 1; do kube-proxy --config proxy.yaml >>log/kube-proxy.log 2>&1; done &
retry kubectl wait --for=condition=Ready "node/$NODE" --timeout=10s
untainted() { [ -z "$(kubectl get node "$NODE" -o jsonpath='{.spec.taints}')" ]; }
retry untainted
retry kubectl get serviceaccount/default configmap/kube-root-ca.crt
if [ "$NODE" = node1 ]; then names; fi
touch ready
wait
