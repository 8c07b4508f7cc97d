// Package plane runs a control plane of Kubernetes for tests: etcd, API server, controller manager
// and scheduler from scripts/build-kubernetes.sh, with this product's CRDs. All listen on loopback
// only. RBAC, pod security and admission policies work as in a cluster. There is no kubelet; KWOK
// simulates nodes.
//
//	func TestMain(m *testing.M) { plane.Main(m) }
//
//	func TestX(t *testing.T) {
//		p := plane.Get(t)          // started by the first test that asks, about 4 s
//		ns := p.Namespace(t)       // of this test alone
//		c := p.Client              // administrator; p.ServiceAccount gives others
//
// If the binaries are missing, a test that needs them is skipped, or fails if every tool is
// required. KUBEVIRT_DISK_KUBERNETES names the directory that was given to the script.
package plane

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/controller"
)

// timeout is how long anything may take on a busy machine before it counts as broken.
const timeout = 2 * time.Minute

// Plane is a running control plane. It is safe for concurrent use.
type Plane struct {
	Dir    string       // logs as NAME.log, certificates, kubeconfig of the administrator
	Bin    string       // the binaries, kubectl among them
	Config *rest.Config // of the administrator, without a limit of requests
	Client client.Client

	processes processes
	services  services
	kwok      sync.Once
	kwokErr   error
}

// one is the plane of this test binary.
var one struct {
	sync.Once
	*Plane
	err error
}

// Main runs the tests of a package and ends its plane. TestMain calls it.
func Main(m *testing.M) {
	status := m.Run()
	if one.Plane != nil {
		one.stop(status != 0)
	}
	os.Exit(status)
}

// Get returns the plane of this test binary, and starts it if this is the first call.
func Get(t testing.TB) *Plane {
	t.Helper()
	bin := Binaries(t, "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler",
		"kubectl")
	one.Do(func() { one.Plane, one.err = start(bin) })
	require.NoError(t, one.err)
	return one.Plane
}

// Commands are the lines of code of a page, one in each, or of one of its sections.
func Commands(t testing.TB, page, heading string) (commands []string) {
	t.Helper()
	name := filepath.Join(testtool.Must(Root())(t), "docs", page)
	section := string(testtool.Must(os.ReadFile(name))(t))
	if heading != "" {
		var found bool
		_, section, found = strings.Cut(section, "\n"+heading+"\n")
		require.True(t, found, heading)
		section, _, _ = strings.Cut(section, "\n## ")
		section, _, _ = strings.Cut(section, "\n### ")
	}
	for line := range strings.Lines(strings.ReplaceAll(section, " \\\n", "")) {
		if command, ok := strings.CutPrefix(line, "    "); ok {
			commands = append(commands, strings.TrimSpace(command))
		}
	}
	return commands
}

// start returns when the API server is ready and has the CRDs. An error has the last output of the
// processes.
func start(bin string) (p *Plane, err error) {
	dir, err := os.MkdirTemp("", "plane-")
	if err != nil {
		return nil, err
	}
	p = &Plane{Dir: dir, Bin: bin}
	defer func() {
		if err != nil {
			err = fmt.Errorf("control plane: %w\n%s", err, p.processes.logs())
			p.stop(false)
		}
	}()
	if err := p.credentials(); err != nil {
		return p, err
	}
	ports, err := freePorts(5)
	if err != nil {
		return p, err
	}
	if err := p.startServer(ports[0], ports[1], ports[2]); err != nil {
		return p, err
	}
	if err := p.startManagers(ports[3], ports[4]); err != nil {
		return p, err
	}
	scheme, err := controller.Scheme()
	if err != nil {
		return p, err
	}
	if p.Client, err = client.New(p.Config, client.Options{Scheme: scheme}); err != nil {
		return p, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	// A claim that names no class has one, as in most clusters. It never gets a volume.
	class := &storagev1.StorageClass{Provisioner: "kubernetes.io/no-provisioner",
		ObjectMeta: metav1.ObjectMeta{Name: "default", Annotations: map[string]string{
			"storageclass.kubernetes.io/is-default-class": "true"}}}
	if err := p.Client.Create(ctx, class); err != nil {
		return p, err
	}
	return p, p.installCRDs(ctx)
}

// startServer starts etcd and the API server, and waits until the API server is ready.
func (p *Plane) startServer(etcd, peer, server int) error {
	etcdURL := fmt.Sprintf("http://127.0.0.1:%d", etcd)
	peerURL := fmt.Sprintf("http://127.0.0.1:%d", peer)
	// Only a test's data is lost with the machine.
	err := p.run("etcd", "--data-dir="+p.path("etcd"), "--listen-client-urls="+etcdURL,
		"--advertise-client-urls="+etcdURL, "--listen-peer-urls="+peerURL,
		"--initial-advertise-peer-urls="+peerURL, "--initial-cluster=default="+peerURL,
		"--unsafe-no-fsync", "--log-level=warn")
	if err != nil {
		return err
	}
	p.Config.Host = fmt.Sprintf("https://127.0.0.1:%d", server)
	if err := p.kubeconfigs(); err != nil {
		return err
	}
	egress, err := p.startServices()
	if err != nil {
		return err
	}
	err = p.run("kube-apiserver", "--etcd-servers="+etcdURL, "--bind-address=127.0.0.1",
		fmt.Sprintf("--secure-port=%d", server),
		// Nothing uses the service of the API server, and loopback cannot be an endpoint.
		"--advertise-address=192.0.2.1", "--endpoint-reconciler-type=none",
		"--tls-cert-file="+p.path("server.crt"), "--tls-private-key-file="+p.path("server.key"),
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file="+p.path("accounts.pub"),
		"--service-account-signing-key-file="+p.path("accounts.key"),
		"--token-auth-file="+p.path("tokens.csv"), "--authorization-mode=Node,RBAC",
		"--service-cluster-ip-range=10.96.0.0/16", "--enable-admission-plugins=NodeRestriction",
		"--egress-selector-config-file="+egress, "--allow-privileged", "--profiling=false",
		"--feature-gates="+Gates())
	if err != nil {
		return err
	}
	return p.serverReady()
}

// RestartServer kills the API server, starts it again, and waits until it is ready. etcd keeps all
// objects.
func (p *Plane) RestartServer(t testing.TB) {
	t.Helper()
	require.NoError(t, errors.Join(p.restart("kube-apiserver"), p.serverReady()))
}

func (p *Plane) serverReady() error {
	transport, err := rest.HTTPClientFor(p.Config)
	if err != nil {
		return err
	}
	return p.until("the API server is ready", func() bool {
		answer, err := transport.Get(p.Config.Host + "/readyz")
		if err != nil {
			return false
		}
		answer.Body.Close()
		return answer.StatusCode == http.StatusOK
	})
}

// startManagers starts the processes that act on objects: garbage collection, StatefulSets,
// scheduling.
func (p *Plane) startManagers(manager, scheduler int) error {
	if err := p.run("kube-controller-manager", "--bind-address=127.0.0.1",
		fmt.Sprintf("--secure-port=%d", manager), "--cert-dir="+p.path("manager"),
		"--kubeconfig="+p.path("manager.kubeconfig"),
		"--authentication-kubeconfig="+p.path("manager.kubeconfig"),
		"--authorization-kubeconfig="+p.path("manager.kubeconfig"),
		"--service-account-private-key-file="+p.path("accounts.key"),
		"--root-ca-file="+p.path("ca.crt"), "--use-service-account-credentials",
		"--leader-elect=false", "--kube-api-qps=500", "--kube-api-burst=1000",
		// KWOK's nodes are silent for a minute on a busy machine.
		"--node-monitor-grace-period=1h"); err != nil {
		return err
	}
	return p.run("kube-scheduler", "--bind-address=127.0.0.1",
		fmt.Sprintf("--secure-port=%d", scheduler), "--cert-dir="+p.path("scheduler"),
		"--kubeconfig="+p.path("scheduler.kubeconfig"),
		"--authentication-kubeconfig="+p.path("scheduler.kubeconfig"),
		"--authorization-kubeconfig="+p.path("scheduler.kubeconfig"),
		"--leader-elect=false", "--kube-api-qps=500", "--kube-api-burst=1000")
}

func (p *Plane) path(name string) string { return filepath.Join(p.Dir, name) }

// until waits for a condition, or for the end of a process, which is an error.
func (p *Plane) until(what string, met func() bool) error {
	for deadline := time.Now().Add(timeout); !met(); {
		if name := p.processes.ended(); name != "" {
			return fmt.Errorf("%s ended", name)
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("waited %s in vain until %s", timeout, what)
		}
		time.Sleep(20 * time.Millisecond)
	}
	return nil
}

// stop ends the plane. With keep, its directory with the logs stays.
func (p *Plane) stop(keep bool) {
	p.processes.kill()
	if p.services.listener != nil {
		p.services.listener.Close()
	}
	if keep {
		fmt.Fprintf(os.Stderr, "the logs of the control plane are in %s\n", p.Dir)
		return
	}
	if err := os.RemoveAll(p.Dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		fmt.Fprintln(os.Stderr, err)
	}
}
