package kubevirt

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"runtime/debug"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/zap"

	"kubevirt.io/disk/kubevirt/hookpb"
)

// name is the hook's name in the launcher's log.
const name = "kubevirt-disk"

// maxMessage is the longest call, in bytes. It is the limit of gRPC's own servers.
const maxMessage = 4 << 20

// Occasion is the reason why a domain is requested.
type Occasion string

// The occasions in calls to plugins. A hook does not get one.
const (
	OccasionUnknown         Occasion = ""
	OccasionBoot            Occasion = "Boot"
	OccasionMigrationSource Occasion = "MigrationSource"
	OccasionMigrationTarget Occasion = "MigrationTarget"
)

// Call is a domain that is about to be defined.
type Call struct {
	Domain   []byte // XML of libvirt
	VMI      []byte // the VirtualMachineInstance, as JSON
	Occasion Occasion
}

// Options are the settings of a Server.
type Options struct {
	// Define returns the domain with the disks in it. An error appears in the launcher's log, and
	// the machine does not start.
	Define func(context.Context, Call) ([]byte, error)
	// Shutdown is called when the machine has ended. It must not wait.
	Shutdown func()
	Log      *zap.Logger // nil: no log
}

// Server answers KubeVirt's launcher by gRPC: as a hook sidecar, with callbacks v1alpha1 to
// v1alpha3, and as a plugin, with MutateDomain.
type Server struct {
	opt  Options
	log  *zap.Logger
	http http.Server
}

// NewServer makes a server.
func NewServer(opt Options) *Server {
	s := &Server{opt: opt, log: opt.Log}
	s.log = cmp.Or(s.log, zap.NewNop())
	mux := http.NewServeMux()
	route(mux, "info.Info/Info", s.info)
	for _, version := range versions() {
		route(mux, version+".Callbacks/OnDefineDomain", s.onDefineDomain)
	}
	route(mux, "v1alpha3.Callbacks/Shutdown", s.shutdown)
	route(mux, "plugins.v1alpha1.DomainHookService/MutateDomain", s.mutateDomain)
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true) // gRPC speaks nothing else at a Unix socket
	// The launcher is local. Another peer must not hold an idle connection for ever.
	s.http = http.Server{Handler: http.NewCrossOriginProtection().Handler(mux),
		Protocols: &protocols, ReadHeaderTimeout: time.Minute, IdleTimeout: 10 * time.Minute,
		ErrorLog: zap.NewStdLog(s.log)}
	return s
}

// versions are the versions of the callbacks.
func versions() []string { return []string{"v1alpha1", "v1alpha2", "v1alpha3"} }

// route serves one procedure of KubeVirt's.
func route[In, Out any](mux *http.ServeMux, procedure string,
	f func(context.Context, *In) (*Out, error)) {
	path := "/kubevirt.hooks." + procedure
	mux.Handle(path, connect.NewUnaryHandlerSimple(path, f, connect.WithReadMaxBytes(maxMessage)))
}

// Serve answers at l until Close, and then returns nil. It closes l.
func (s *Server) Serve(l net.Listener) error {
	if err := s.http.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("the hook stopped answering: %w", err)
	}
	return nil
}

// Close ends the server when all pending calls are answered, or when ctx ends.
func (s *Server) Close(ctx context.Context) error {
	err := s.http.Shutdown(ctx)
	if err != nil {
		_ = s.http.Close()
	}
	return err
}

func (s *Server) info(context.Context, *hookpb.Empty) (*hookpb.InfoResult, error) {
	return &hookpb.InfoResult{
		Name: name,
		HookPoints: []*hookpb.HookPoint{
			{Name: "OnDefineDomain"},
			{Name: "Shutdown"},
		},
		Versions: versions(),
	}, nil
}

func (s *Server) onDefineDomain(ctx context.Context, in *hookpb.DomainParams,
) (*hookpb.DomainResult, error) {
	domain, err := s.define(ctx, Call{Domain: in.DomainXml, VMI: in.Vmi})
	return &hookpb.DomainResult{DomainXml: domain}, err
}

func (s *Server) mutateDomain(ctx context.Context, in *hookpb.MutateRequest,
) (*hookpb.MutateResponse, error) {
	if in.DomainType != "libvirt" {
		return nil, connect.NewError(connect.CodeInvalidArgument,
			fmt.Errorf("the domain is of type %q: %s knows only libvirt", in.DomainType, name))
	}
	domain, err := s.define(ctx, Call{Domain: in.Domain, VMI: in.Vmi,
		Occasion: Occasion(in.GetSidecarContext().GetInvocationContext())})
	return &hookpb.MutateResponse{Domain: domain}, err
}

func (s *Server) shutdown(context.Context, *hookpb.Empty) (*hookpb.Empty, error) {
	s.log.Info("the launcher says that the machine has ended")
	s.opt.Shutdown()
	return &hookpb.Empty{}, nil
}

// define answers a call, and turns a failure into an error of gRPC.
func (s *Server) define(ctx context.Context, c Call) (domain []byte, err error) {
	defer func() {
		if p := recover(); p != nil {
			s.log.Error("internal error: the domain is refused", zap.Any("panic", p),
				zap.ByteString("stack", debug.Stack()))
			err = connect.NewError(connect.CodeInternal, fmt.Errorf("%s: internal error", name))
		}
	}()
	if domain, err = s.opt.Define(ctx, c); err != nil {
		s.log.Error("the domain is refused", zap.Error(err))
		return nil, connect.NewError(connect.CodeFailedPrecondition,
			fmt.Errorf("%s: %w", name, err))
	}
	s.log.Info("the domain has the disks")
	return domain, nil
}
