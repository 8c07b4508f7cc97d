package kubevirt

import (
	"context"
	"errors"
	"net"
	"path/filepath"
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
