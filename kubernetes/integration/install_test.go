package kubernetes

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/client-go/rest"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
	"kubevirt.io/disk/kubernetes/integration/plane"
)

const (
	systemNamespace = "kubevirt-disk-system"
	account         = "kubevirt-disk-controller"
	timeout         = 3 * time.Minute
)

// install applies the manifest to the plane, which the tests of this package share.
func install(t testing.TB, p *plane.Plane) {
	t.Helper()
	installed.Do(func() {
		p.Kubectl(t, "apply", "--server-side", "--force-conflicts", "-f",
			controllertest.Manifest(t))
	})
}

var installed sync.Once

// TestWhatTheControllerMustNotDo asks the API server what the role of the manifest allows.
func TestWhatTheControllerMustNotDo(t *testing.T) {
	p := plane.Get(t)
	install(t, p)
	can := func(what string) bool { return p.Allowed(t, systemNamespace, account, what) }
	for _, what := range []string{
		"patch pods in default", "create secrets in default", "delete secrets in default",
		"create persistentvolumeclaims in default",
	} {
		require.True(t, can(what), "%s: so that this test can fail", what)
	}
	for _, what := range []string{
		"update vmidentities.disk.kubevirt.io in default", "get vmpets.disk.kubevirt.io in default",
		"update vmidentities/finalizers.disk.kubevirt.io in default",
		"get vmidentities/status.disk.kubevirt.io in default",
		"create statefulsets.apps in default", "create vmidentitysets.disk.kubevirt.io in default",
		"get statefulsets.apps in default", "get deployments.apps in default",
		"get services in default", "create events in default", "get namespaces",
		"get storageclasses.storage.k8s.io",
		"get secrets in default", "list secrets in default", "watch secrets in default",
		"list secrets in kube-system", "get secrets in " + systemNamespace,
		"update secrets in default", "patch secrets in default",
		"get configmaps in kube-system", "update configmaps in default",
		"create pods in default", "create pods/exec in default", "create pods/attach in default",
		"create pods/ephemeralcontainers in default", "create pods/binding in default",
		"delete pods in default", "deletecollection pods in default",
		"create serviceaccounts/token in default", "create serviceaccounts/token in kube-system",
		"impersonate users", "impersonate serviceaccounts in kube-system",
		"escalate clusterroles.rbac.authorization.k8s.io", "bind roles.rbac.authorization.k8s.io",
		"create clusterrolebindings.rbac.authorization.k8s.io",
		"create rolebindings.rbac.authorization.k8s.io in default",
		"update customresourcedefinitions.apiextensions.k8s.io",
		"create mutatingwebhookconfigurations.admissionregistration.k8s.io",
		"update mutatingwebhookconfigurations.admissionregistration.k8s.io named pods." +
			v1alpha1.Group,
		"patch validatingwebhookconfigurations.admissionregistration.k8s.io named pods." +
			v1alpha1.Group,
		"get secrets in " + systemNamespace + " named kubevirt-disk-webhook-certificate",
		"update validatingadmissionpolicies.admissionregistration.k8s.io",
		"create nodes", "patch nodes", "get nodes/proxy", "create persistentvolumes",
		"delete namespaces", "create daemonsets.apps in kube-system",
		"deletecollection persistentvolumeclaims in default",
		"deletecollection vmidentities.disk.kubevirt.io in default",
		"delete vmidentities.disk.kubevirt.io in default",
		"delete vmidentitysets.disk.kubevirt.io in default",
		"create leases.coordination.k8s.io in kube-system",
		"update leases.coordination.k8s.io in " + systemNamespace,
	} {
		require.False(t, can(what), what)
	}
}

// controllerBinary builds kubevirt-disk-controller once.
func controllerBinary(t testing.TB) string {
	t.Helper()
	built.Do(func() {
		root := testtool.Must(plane.Root())(t)
		built.path = filepath.Join(plane.Get(t).Dir, "kubevirt-disk-controller")
		// As the Makefile builds it, so that nothing is compiled twice.
		cmd := exec.Command("go", "build", "-trimpath", "-o", built.path, "./command")
		cmd.Dir, cmd.Env = filepath.Join(root, "kubernetes"), append(os.Environ(), "CGO_ENABLED=0")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, string(out))
	})
	return built.path
}

var built struct {
	sync.Once
	path string
}

// running is a controller as a process of its own.
type running struct {
	t      testing.TB
	cmd    *exec.Cmd
	health string
	hook   string // where its webhook listens
	log    string
	done   chan struct{}
}

// runController starts a controller with a config, and without pets, as the manifest does, unless
// an argument says what it is without. The test ends it.
func runController(t testing.TB, binary string, config *rest.Config, args ...string) *running {
	t.Helper()
	if !slices.ContainsFunc(args, func(a string) bool {
		return strings.HasPrefix(a, "--without")
	}) {
		args = append(args, "--without=pets")
	}
	dir := t.TempDir()
	kubeconfig := filepath.Join(dir, "kubeconfig")
	require.NoError(t, plane.Kubeconfig(config, kubeconfig))
	r := &running{t: t, health: plane.FreeAddress(t), hook: plane.FreeAddress(t),
		log: filepath.Join(dir, "log"), done: make(chan struct{})}
	log := testtool.Must(os.Create(r.log))(t)
	defer log.Close()
	r.cmd = exec.Command(binary, append([]string{"--kubeconfig=" + kubeconfig,
		"--leader-election-namespace=" + systemNamespace, "--metrics-listen=0",
		"--health-listen=" + r.health, "--webhook-listen=" + r.hook,
		"--webhook-certificate=" + plane.Get(t).WebhookCertificate(t, systemNamespace)},
		args...)...)
	r.cmd.Stdout, r.cmd.Stderr = log, log
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	require.NoError(t, r.cmd.Start())
	go func() {
		defer close(r.done)
		_ = r.cmd.Wait() // ProcessState has it
	}()
	t.Cleanup(func() {
		_ = r.cmd.Process.Kill() // it may have ended
		<-r.done
		if t.Failed() {
			t.Log(r.logs())
		}
	})
	return r
}

// ready waits until /readyz reports that it is ready, and the API server asks it about pods.
func (r *running) ready() {
	r.t.Helper()
	var last any
	testtool.Within(r.t, timeout, func() bool {
		answer, err := http.Get(fmt.Sprintf("http://%s/readyz", r.health))
		if err != nil {
			last = err
			return false
		}
		answer.Body.Close()
		last = answer.Status
		return answer.StatusCode == http.StatusOK
	}, "it is ready: %v", func() any { return last })
	plane.Get(r.t).Webhook(r.t, r.hook)
}

// terminate ends it like Kubernetes, and returns its exit status.
func (r *running) terminate() int {
	r.t.Helper()
	require.NoError(r.t, r.cmd.Process.Signal(syscall.SIGTERM))
	<-r.done
	return r.cmd.ProcessState.ExitCode()
}

func (r *running) logs() string {
	data, err := os.ReadFile(r.log)
	if err != nil {
		return err.Error()
	}
	return string(data)
}
