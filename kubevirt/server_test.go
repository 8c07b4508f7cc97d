package kubevirt

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zaptest"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/kubevirt/hookpb"
)

// asked is a server whose hook notes its calls, and gRPC's own client of it.
type asked struct {
	*grpc.ClientConn
	*Server
	calls  []Call
	answer func(Call) ([]byte, error)
	over   int
}

func ask(t *testing.T, options ...grpc.DialOption) *asked {
	t.Helper()
	a := &asked{answer: func(Call) ([]byte, error) { return []byte("<domain/>"), nil }}
	a.Server = NewServer(Options{
		Define: func(_ context.Context, c Call) ([]byte, error) {
			a.calls = append(a.calls, c)
			return a.answer(c)
		},
		Shutdown: func() { a.over++ },
		Log:      zaptest.NewLogger(t),
	})
	path := filepath.Join(t.TempDir(), "hook.sock")
	l := testtool.Must(net.Listen("unix", path))(t)
	served := testtool.Go(func() error { return a.Serve(l) })
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		require.NoError(t, a.Server.Close(ctx))
		require.NoError(t, <-served)
	})
	// The launcher gives gRPC the path as if it was an address, and connects itself.
	options = append(options, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, path string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}))
	a.ClientConn = testtool.Must(grpc.NewClient("passthrough:///"+path, options...))(t)
	t.Cleanup(func() { require.NoError(t, a.ClientConn.Close()) })
	return a
}

func (a *asked) call(t *testing.T, procedure string, in, out any) error {
	t.Helper()
	return a.Invoke(t.Context(), "/kubevirt.hooks."+procedure, in, out)
}

// TestInfo asks as launchers of all ages do: some name an authority, some do not.
func TestInfo(t *testing.T) {
	for _, options := range [][]grpc.DialOption{nil, {grpc.WithAuthority("localhost")}} {
		a := ask(t, options...)
		var info hookpb.InfoResult
		require.NoError(t, a.call(t, "info.Info/Info", &hookpb.Empty{}, &info))
		require.Equal(t, "kubevirt-disk", info.Name)
		require.Equal(t, []string{"v1alpha1", "v1alpha2", "v1alpha3"}, info.Versions)
		require.Len(t, info.HookPoints, 2)
		require.Equal(t, "OnDefineDomain", info.HookPoints[0].Name)
		require.Equal(t, "Shutdown", info.HookPoints[1].Name)
	}
}

func TestOnDefineDomain(t *testing.T) {
	a := ask(t)
	in := &hookpb.DomainParams{DomainXml: []byte("<domain>1</domain>"), Vmi: []byte("{}")}
	for i, version := range []string{"v1alpha1", "v1alpha2", "v1alpha3"} {
		var out hookpb.DomainResult
		require.NoError(t, a.call(t, version+".Callbacks/OnDefineDomain", in, &out))
		require.Equal(t, "<domain/>", string(out.DomainXml))
		require.Len(t, a.calls, i+1)
		require.Equal(t, Call{Domain: in.DomainXml, VMI: in.Vmi}, a.calls[i])
	}
	// The text of an error is what a person finds in the launcher's log.
	const told = `disk "müll" has failed: 100% of it, in two
lines`
	a.answer = func(Call) ([]byte, error) { return nil, errors.New(told) }
	err := a.call(t, "v1alpha3.Callbacks/OnDefineDomain", in, &hookpb.DomainResult{})
	require.Equal(t, codes.FailedPrecondition, status.Code(err))
	require.Equal(t, "kubevirt-disk: "+told, status.Convert(err).Message())

	a.answer = func(Call) ([]byte, error) { panic("a mistake") }
	err = a.call(t, "v1alpha3.Callbacks/OnDefineDomain", in, &hookpb.DomainResult{})
	require.Equal(t, codes.Internal, status.Code(err))

	in.DomainXml = []byte(strings.Repeat("x", maxMessage))
	err = a.call(t, "v1alpha3.Callbacks/OnDefineDomain", in, &hookpb.DomainResult{})
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	require.Len(t, a.calls, 5)
}

func TestMutateDomain(t *testing.T) {
	a := ask(t)
	in := &hookpb.MutateRequest{DomainType: "libvirt", Domain: []byte("<domain>1</domain>"),
		Vmi: []byte("{}"), SidecarContext: &hookpb.SidecarContext{
			InvocationContext: "MigrationTarget"}}
	var out hookpb.MutateResponse
	const procedure = "plugins.v1alpha1.DomainHookService/MutateDomain"
	require.NoError(t, a.call(t, procedure, in, &out))
	require.Equal(t, "<domain/>", string(out.Domain))
	require.Equal(t, []Call{{Domain: in.Domain, VMI: in.Vmi, Occasion: OccasionMigrationTarget}},
		a.calls)
	in.SidecarContext = nil
	require.NoError(t, a.call(t, procedure, in, &out))
	require.Equal(t, OccasionUnknown, a.calls[1].Occasion)
	in.DomainType = "cloud-hypervisor"
	err := a.call(t, procedure, in, &out)
	require.Equal(t, codes.InvalidArgument, status.Code(err))
	require.ErrorContains(t, err, "cloud-hypervisor")
}

func TestShutdown(t *testing.T) {
	a := ask(t)
	require.NoError(t, a.call(t, "v1alpha3.Callbacks/Shutdown", &hookpb.Empty{}, &hookpb.Empty{}))
	require.Equal(t, 1, a.over)
	err := a.call(t, "v1alpha1.Callbacks/Shutdown", &hookpb.Empty{}, &hookpb.Empty{})
	require.Equal(t, codes.Unimplemented, status.Code(err), "that version has no such call")
}

// release is what a version of KubeVirt calls, and what it gets.
type release struct {
	version string
	calls   []string // procedures that we answer
	others  string   // what else it calls; "": nothing
	after   string   // what becomes of the answer
	known   string
}

// releases are all that we know of. docs/kubevirt.md has the same table.
func releases() []release {
	hooks := []string{"info.Info/Info", "v1alpha1.Callbacks/OnDefineDomain",
		"v1alpha2.Callbacks/OnDefineDomain", "v1alpha3.Callbacks/OnDefineDomain",
		"v1alpha3.Callbacks/Shutdown"}
	plugins := append(hooks[:len(hooks):len(hooks)],
		"plugins.v1alpha1.DomainHookService/MutateDomain")
	const asItIs, address = "defined as it is", "no sockets beside a `Plugin`"
	return []release{
		{"1.7", hooks, "", asItIs, "1.7.0 was run"},
		{"1.8", hooks, "", asItIs, "1.8.2 was read"},
		{"1.9, sidecar", hooks, "", address, "its launcher was run"},
		{"1.9, plugin", plugins, "", asItIs, "its launcher was run"},
		{"1.10", hooks, "`launcherHooks`", "unknown", "its proposal was read"},
	}
}

// row is that of the documentation.
func (r *release) row() string {
	calls := "hook sidecars, v1alpha1 to v1alpha3"
	if strings.HasSuffix(r.version, "plugin") {
		calls = "`MutateDomain`, v1alpha1"
	}
	others := cmp.Or(r.others, "nothing")
	return fmt.Sprintf("| %s | %s | %s | %s | %s |", r.version, calls, others, r.after, r.known)
}

// TestReleases: what the table says is answered is answered, and the documentation has the table.
func TestReleases(t *testing.T) {
	s := NewServer(Options{})
	var rows []string
	for _, r := range releases() {
		rows = append(rows, r.row())
		for _, procedure := range r.calls {
			w := httptest.NewRecorder()
			s.http.Handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet,
				"/kubevirt.hooks."+procedure, nil))
			require.NotEqual(t, http.StatusNotFound, w.Code, "%s: %s", r.version, procedure)
		}
	}
	page := testtool.Must(os.ReadFile("../docs/kubevirt.md"))(t)
	require.Contains(t, string(page), strings.Join(rows, "\n"))
}

// TestMemoryOfDomains: what a domain takes is in proportion to its length, whatever it is full of.
func TestMemoryOfDomains(t *testing.T) {
	const most = maxMessage - 100
	for name, piece := range map[string]string{"comments in text": "x<!---->",
		"comments": "<!---->", "text": "x", "instructions": "x<?a?>"} {
		domain := "<domain><devices/>" + strings.Repeat(piece, most/len(piece)) + "</domain>"
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := Edit(Call{Domain: []byte(domain), VMI: vmi()}, served("a"), "")
		runtime.ReadMemStats(&after)
		require.NoError(t, err, name)
		require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(256<<20), name)
	}
	for _, piece := range []string{"<a/>", "<a></a>", `<a b="" c=""/>`} {
		_, err := parse([]byte("<domain>" + strings.Repeat(piece, most/len(piece)) + "</domain>"))
		require.ErrorContains(t, err, "more than 65536 elements")
	}
}
