package main

import (
	"context"
	"fmt"
	"io"
	"os/signal"
	"runtime"
	"strings"
	"syscall"

	"github.com/go-logr/zapr"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	controllermetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"kubevirt.io/disk/kubernetes/admission/webhook"
	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller"
	"kubevirt.io/disk/kubernetes/controller/metrics"
)

// leaseName is the Lease with which the replicas elect a leader.
const leaseName = "kubevirt-disk-controller"

// settings are the values of the flags and the environment variables.
type settings struct {
	kubeconfig    string
	namespaces    []string
	leaderElect   bool
	leaseSpace    string
	metricsListen string
	metricsOpen   bool
	healthListen  string
	logLevel      string
	claimSize     string
	webhook       webhook.Options
	options       controller.Options
}

func command(stdout, stderr io.Writer) *cobra.Command {
	var s settings
	cmd := &cobra.Command{
		Use:   "kubevirt-disk-controller",
		Short: "Keep the disks of virtual machines in Kubernetes",
		Long: `Keeps the disks of virtual machines in Kubernetes: makes the claims and credentials of VMIdentity
objects, and lets pods start when their disk is ready.

Exit status: 0 done, 1 failed while running, 2 wrong usage or configuration.`,
		Version:       version,
		Args:          cobra.NoArgs,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(*cobra.Command, []string) error {
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
			defer stop()
			return s.run(ctx, stderr)
		},
	}
	cmd.SetVersionTemplate(fmt.Sprintf(
		"kubevirt-disk-controller %s\ncommit   %s\ngo       %s\nplatform %s/%s\n",
		version, commit, runtime.Version(), runtime.GOOS, runtime.GOARCH))
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	s.flags(cmd.Flags())
	cmd.AddCommand(sendCommand(stderr), receiveCommand(stderr))
	return cmd
}

func (s *settings) flags(f *pflag.FlagSet) {
	f.StringVar(&s.kubeconfig, "kubeconfig", "",
		"kubeconfig file; empty: the pod's service account")
	f.StringSliceVar(&s.namespaces, "namespace", nil,
		"a namespace to work in, can be repeated; none: all of them")
	f.BoolVar(&s.leaderElect, "leader-elect", true,
		"work only while this replica holds the Lease "+leaseName)
	f.StringVar(&s.leaseSpace, "leader-election-namespace", "",
		"namespace of the Lease; empty: that of the pod")
	f.StringVar(&s.metricsListen, "metrics-listen", ":8080",
		"address of the Prometheus metrics at /metrics; 0: none")
	f.BoolVar(&s.metricsOpen, "metrics-open", false,
		"serve the metrics to everybody, without TLS; otherwise by HTTPS to those with a token "+
			"of the cluster and the right to get /metrics")
	f.StringVar(&s.healthListen, "health-listen", ":8081",
		"address of the probes at /healthz and /readyz; 0: none")
	f.StringVar(&s.logLevel, "log-level", "info", "debug, info, warn or error")
	f.StringVar(&s.options.Server, "server-image", "kubevirt.io:disk",
		"image of kubevirt-disk that serves disks in pods")
	f.StringVar(&s.claimSize, "claim-size", "20Gi", "size of a claim if its VMIdentity gives no "+
		"size")
	f.StringToStringVar(&s.options.UsageTypes, "usage-type", nil,
		"NAME=CLASS: the storage class of a usage type, can be repeated")
	f.StringSliceVar(&s.options.ReadWriteOnce, "read-write-once", nil, "a storage class whose "+
		"volumes do not support ReadWriteOncePod, can be repeated; *: all of them")
	f.StringVar(&s.webhook.Listen, "webhook-listen", ":9443",
		"address of the webhook that gives pods their disks")
	f.StringVar(&s.webhook.Certificate, "webhook-certificate", "",
		"directory with tls.crt and tls.key, by which the API server knows the webhook")
	f.StringVar(&s.options.SnapshotClass, "snapshot-class", "",
		"VolumeSnapshotClass for population Snapshot; empty: the driver's default")
	f.StringVar(&s.options.PullSecret, "pull-secret", "", "secret with the registry's "+
		"credential, in the namespaces of identities, for population Snapshot")
	f.StringVar(&s.options.PullCA, "pull-ca", "", "ConfigMap with certificates (ca.crt) that are "+
		"trusted for that registry, too, in the namespaces of identities")
	f.StringSliceVar(&s.options.Without, "without", nil,
		"feature to turn off, which then needs no rights; can be repeated: "+
			strings.Join(controller.Optional(), ", "))
	f.StringVar(&s.options.MoveImage, "move-image", "", "image of kubevirt-disk-controller that "+
		"moves disks of type Local to other nodes; empty: they stay where they are")
	f.StringVar(&s.options.Signatures.Policies, "signature-policies", "",
		"directory of policies NAME.yaml that say whose signatures images must have: a namespace "+
			"has that which its label "+v1alpha1.LabelSignaturePolicy+" names, or default.yaml; "+
			"empty: nobody's")
	registry := &s.options.Signatures.Registry
	f.StringVar(&registry.Config, "registry-config", "",
		"file of credentials, as docker's config.json, for reading signatures and tags")
	f.StringVar(&registry.CA, "registry-ca", "",
		"file of certificates (PEM) that are trusted in addition to the system's, for the same")
	f.StringSliceVar(&registry.Mirrors, "registry-mirror", nil,
		"HOST=MIRROR[/PREFIX]: ask the mirror before that registry; can be repeated")
	f.StringSliceVar(&registry.Insecure, "insecure-registry", nil,
		"a registry that may be used without TLS, as host or host:port; can be repeated")
	f.StringSliceVar(&s.options.Follow, "follow-registry", nil,
		"a registry, HOST or HOST/PATH, whose tags VMIdentitySets may follow; can be repeated")
	f.BoolVar(&s.options.FillClaims, "fill-claims", false,
		"fill the claims that name a VMImage as their dataSourceRef")
	f.BoolVar(&s.options.Volumes, "persistent-volumes", false,
		"make the PersistentVolumes that VMIdentities with attachment Service ask for")
	f.IntVar(&s.options.Concurrency, "concurrency", 8,
		"how many objects of a kind are worked on at once")
}

func (s *settings) run(ctx context.Context, stderr io.Writer) error {
	level, err := zapcore.ParseLevel(s.logLevel)
	if err != nil {
		return fmt.Errorf("log-level: %q is not a log level: use debug, info, warn or error",
			s.logLevel)
	}
	if s.options.ClaimSize, err = resource.ParseQuantity(s.claimSize); err != nil {
		return fmt.Errorf("claim-size: %q is not a size: write it as 20Gi", s.claimSize)
	}
	if err := s.options.Check(); err != nil {
		return err
	}
	s.webhook.Server, s.webhook.Namespaces = s.options.Server, s.namespaces
	if err := s.webhook.Check(); err != nil {
		return err
	}
	config, err := s.config()
	if err != nil {
		return fmt.Errorf("the configuration of the API server cannot be read: %w", err)
	}
	if err := s.options.Signatures.Check(); err != nil {
		return err
	}
	log := newLogger(level, stderr)
	defer func() { _ = log.Sync() }()
	ctrl.SetLogger(zapr.NewLogger(log))
	klog.SetLogger(zapr.NewLogger(log).WithName("client"))
	mgr, err := s.manager(config)
	if err != nil {
		return &failure{err}
	}
	log.Info("starting", zap.String("version", version), zap.String("commit", commit))
	if err := mgr.Start(ctx); err != nil {
		return &failure{err}
	}
	return nil
}

// config returns the configuration for the API server. It sets no rate limit, because a limit here
// would slow down a backlog: the API server has its own priority and fairness.
func (s *settings) config() (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags("", s.kubeconfig)
	if err != nil {
		return nil, err
	}
	config.QPS = -1
	config.UserAgent = "kubevirt-disk-controller/" + version
	return config, nil
}

func (s *settings) manager(config *rest.Config) (ctrl.Manager, error) {
	scheme, err := controller.Scheme()
	if err != nil {
		return nil, err
	}
	cache, err := controller.Cache(s.namespaces...)
	if err != nil {
		return nil, err
	}
	metricsOptions := metricsserver.Options{BindAddress: s.metricsListen}
	if !s.metricsOpen {
		metricsOptions.SecureServing, metricsOptions.FilterProvider = true, authenticated
	}
	mgr, err := ctrl.NewManager(config, ctrl.Options{
		Scheme:                  scheme,
		Cache:                   cache,
		Metrics:                 metricsOptions,
		HealthProbeBindAddress:  s.healthListen,
		LeaderElection:          s.leaderElect,
		LeaderElectionID:        leaseName,
		LeaderElectionNamespace: s.leaseSpace,
		// The process ends with the manager, so it has stopped working when the next leader starts.
		LeaderElectionReleaseOnCancel: true,
	})
	if err != nil {
		return nil, err
	}
	if err := mgr.AddHealthzCheck("ping", healthz.Ping); err != nil {
		return nil, err
	}
	if err := mgr.AddReadyzCheck("ping", healthz.Ping); err != nil {
		return nil, err
	}
	if err := controllermetrics.Registry.Register(metrics.New(mgr.GetCache(),
		mgr.Elected())); err != nil {
		return nil, err
	}
	if err := webhook.Setup(mgr, s.webhook); err != nil {
		return nil, err
	}
	s.options.Namespaces = s.namespaces
	return mgr, controller.Setup(mgr, s.options)
}

// newLogger writes JSON lines as kubevirt-disk does.
func newLogger(level zapcore.Level, w io.Writer) *zap.Logger {
	encoding := zap.NewProductionEncoderConfig()
	encoding.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	encoding.EncodeDuration = zapcore.StringDurationEncoder
	encoding.TimeKey = "time"
	out := zapcore.Lock(zapcore.AddSync(w))
	core := zapcore.NewCore(zapcore.NewJSONEncoder(encoding), out, level)
	return zap.New(core, zap.ErrorOutput(out))
}
