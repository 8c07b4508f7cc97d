package main

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"unicode"

	"github.com/spf13/pflag"

	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/registry/transport"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target"
)

const (
	keyDiskDir        = "disk-dir"
	keyWorkDir        = "work-dir"
	keyListen         = "listen"
	keyPort           = settings.KeyPort
	keyISCSI          = "iscsi"
	keyNBD            = "nbd"
	keyVhostUser      = "vhost-user"
	keyNBDTLSCert     = "nbd-tls-cert"
	keyNBDTLSKey      = "nbd-tls-key"
	keyNBDClientCA    = "nbd-client-ca"
	keyKubevirtHook   = "kubevirt-hook"
	keyPersistentDir  = "persistent-dir"
	keyMemory         = "memory"
	keyDisk           = "disk"
	keyDiskTLSCert    = "disk-tls-cert"
	keyDiskTLSKey     = "disk-tls-key"
	keyDiskServerCA   = "disk-server-ca"
	keyTargetName     = settings.KeyTargetName
	keyCopyMode       = settings.KeyCopyMode
	keyAccessMode     = settings.KeyAccessMode
	keyMetricsListen  = settings.KeyMetricsListen
	keyReadyFile      = "ready-file"
	keyLogLevel       = "log-level"
	keyLogFormat      = "log-format"
	keySize           = "size"
	keyBlockSize      = "block-size"
	keyControlSocket  = "control-socket"
	keyContainerImage = "container-image"
	keyUsageType      = "usage-type"
	keyPodAnnotations = "pod-annotations"
	keyOnImageChange  = "on-image-change"
	keyBehindNAT      = "behind-nat"
	keyInsecureNoAuth = "insecure-no-auth"
	keyRecordBoot     = "record-boot"
	keyPagesHost      = "pages-host"
)

// The sections of serve's settings, in the help and in docs/configuration.md.
const (
	sectionDisks    = "Which disks"
	sectionPlaces   = "Where they lie"
	sectionISCSI    = "iSCSI"
	sectionNBD      = "NBD and KubeVirt"
	sectionRegistry = "Registries and cache"
	sectionTrust    = "Trust"
	sectionVolumes  = "Volumes"
	sectionMachines = "Container images"
	sectionPages    = "Pages and log"
	sectionLimits   = "Limits"
)

// firstSettings are those that the help of serve shows without --help=all.
var firstSettings = []string{keyDiskDir, "image", keyCopyMode, keySize, keyAccessMode, keyWorkDir,
	keyPersistentDir, keyListen, keyNBD, keyLogLevel}

const (
	defaultPort        = 3260
	defaultMetricsPort = 9260
)

// settings are all settings of serve except those of single disks, in the order of the help text.
func (c *config) settings() []settings.Setting {
	return settings.Only(c.rows(), func(s settings.Setting) bool {
		return s.Scope != settings.ForOneDisk
	})
}

// diskSettings are the settings that a single disk can have in the YAML file.
func (c *config) diskSettings() []settings.Setting {
	return settings.Only(c.rows(), func(s settings.Setting) bool {
		return s.Scope != settings.ForDaemon
	})
}

// rows are all settings of serve, by section.
func (c *config) rows() []settings.Setting {
	volumes := cmp.Or(c.Volumes, new(options.Volumes))
	registry := &c.Streams.Registry
	return slices.Concat(
		c.diskRows(), c.placeRows(), c.iscsiRows(), c.nbdRows(),
		c.cacheRows(), registrySettings(registry),
		c.trustRows(), addressSettings(registry), trustSettings(&c.Streams.Signatures),
		volumeSettings(volumes),
		machineSettings(&c.Containers.Machine),
		c.operatingRows(), c.limitRows(), c.singleRows(),
	)
}

func (c *config) diskRows() []settings.Setting {
	disk := &c.Settings.Disk
	return settings.InSection(sectionDisks, []settings.Setting{
		{Key: keyDiskDir, Env: []string{"DISK_DIR"}, Default: "/disk",
			Usage: "`directory` of the images to serve: sorted naturally, LUN 1, 2, ...",
			Kind:  settings.KindDir, To: settings.Text(&c.Images.Dir)},
		{Key: "image", Env: []string{"IMAGE"}, Kind: settings.KindList,
			Usage: "`reference` of an image in a registry, or https://... of a disk: LUNs after " +
				"those of the directory, fetched as they are read; repeatable",
			To: references(&c.Streams.References, transport.ParseSource)},
		{Key: keyContainerImage, Env: []string{"CONTAINER_IMAGE"}, Kind: settings.KindList,
			Usage: "`reference` of a container image: it becomes a disk that boots and runs its " +
				"entry point, a LUN after those of --image; repeatable",
			To: references(&c.Containers.References, transport.ParseReference)},
		{Key: keyDisk, Env: []string{"DISK"}, Kind: settings.KindList,
			Usage: "`URI` of a disk that another kubevirt-disk serves by NBD, as in " +
				"nbds://HOST/EXPORT: a LUN after those of images; repeatable",
			To: remotes(&c.Remotes.Disks)},
		{Key: keyDiskTLSCert, Env: []string{"DISK_TLS_CERT"}, Kind: settings.KindFile,
			Usage: "PEM `file` with the certificate that servers of --disk know this daemon by",
			To:    settings.Text(&c.Remotes.Cert)},
		{Key: keyDiskTLSKey, Env: []string{"DISK_TLS_KEY"}, Kind: settings.KindFile,
			Usage: "PEM `file` with its key", To: settings.Text(&c.Remotes.Key)},
		{Key: keyDiskServerCA, Env: []string{"DISK_SERVER_CA"}, Kind: settings.KindFile,
			Usage: "PEM `file` with the authorities that have signed these servers' " +
				"certificates (default the system's)",
			To: settings.Text(&c.Remotes.ServerCA)},
		{Key: keyCopyMode, Env: []string{"COPY_MODE"}, Default: "clone",
			Usage: "what is copied of an image: `mode` clone (everything, in the background), " +
				"copy-on-read, copy-on-write, or none (raw image, served in place)",
			To: settings.Into(&disk.CopyMode, instance.ParseCopyMode),
			Choices: texts(instance.CopyClone, instance.CopyOnRead, instance.CopyOnWrite,
				instance.CopyNone), Scope: settings.ForDisks},
		{Key: keySize, Env: []string{"SIZE"},
			Usage: "`bytes` of each disk, as 20Gi: at least the image's, never less than before " +
				"(default the image's)",
			To: settings.Into(&disk.Size, parseSize), Scope: settings.ForDisks},
		{Key: keyBlockSize, Env: []string{"BLOCK_SIZE"},
			Usage: "`bytes` of a logical block: 512, or 4096 for images that were made with such " +
				"blocks (default what the disk has had so far, or 512)",
			To: settings.Into(&disk.BlockSize, parseBlockSize), Scope: settings.ForDisks,
			Choices: []string{"512", "4096"}},
		{Key: keyAccessMode, Env: []string{"ACCESS_MODE"}, Default: "write-exclusive",
			Usage: "who may use a LUN at once: `mode` write-exclusive, write-shared or read-shared",
			To:    settings.Into(&disk.AccessMode, serving.ParseAccessMode),
			Choices: texts(serving.AccessWriteExclusive, serving.AccessWriteShared,
				serving.AccessReadShared), Scope: settings.ForDisks},
	})
}

func (c *config) placeRows() []settings.Setting {
	return settings.InSection(sectionPlaces, []settings.Setting{
		{Key: keyWorkDir, Env: []string{"WORK_DIR"}, Default: "/var/lib/kubevirt-disk",
			Usage: "`directory` for the disks' copied and written data, and their state",
			Kind:  settings.KindDir, To: settings.Text(&c.WorkDir)},
		{Key: keyPersistentDir, Env: []string{"PERSISTENT_DIR"}, Empty: true,
			Usage: "`directory` of a mounted volume on which disks survive: disk.img for one " +
				"image, a directory for each of several",
			Kind: settings.KindDir, To: settings.Text(&c.PersistentDir)},
		{Key: keyUsageType, Env: []string{"USAGE_TYPES"}, Kind: settings.KindList,
			Usage: "`NAME=DIRECTORY` of storage that disks can choose for their written data, " +
				"under disks in the YAML file; repeatable",
			To: settings.Landing{At: &c.UsageTypes}},
		{Key: keyPodAnnotations, Env: []string{"POD_ANNOTATIONS"},
			Usage: "`file` of the downward API with the pod's annotations: " + usageTypeAnnotation +
				"NAME adds a usage type",
			Kind: settings.KindFile, To: settings.Text(&c.annotations)},
		{Key: keyOnImageChange, Env: []string{"ON_IMAGE_CHANGE"}, Default: "fail",
			Usage: "what to do if the image of a persistent disk has changed: `action` fail, or " +
				"keep (serve it as it is)",
			To:      settings.Into(&c.OnImageChange, instance.ParseImageChange),
			Choices: texts(instance.ImageChangeFail, instance.ImageChangeKeep)},
		{Key: "leftovers", Env: []string{"LEFTOVERS"},
			Usage: "what to do with disks outside of a persistent directory if their images are " +
				"gone or have changed: `action` keep (set them aside, with what guests wrote) or " +
				"remove (default keep if --work-dir is given, remove otherwise)",
			To:      settings.Into(&c.Leftovers, instance.ParseLeftovers),
			Choices: texts(instance.LeftoversKeep, instance.LeftoversRemove)},
		{Key: "ephemeral-flush", Env: []string{"EPHEMERAL_FLUSH"}, Default: "false",
			Kind: settings.KindBool,
			Usage: "let a flush of a disk that dies with the pod reach storage, so that it " +
				"survives a crash of the machine",
			To: settings.Truth(&c.EphemeralFlush)},
	})
}

func (c *config) iscsiRows() []settings.Setting {
	return settings.InSection(sectionISCSI, []settings.Setting{
		{Key: keyListen, Env: []string{"LISTEN"}, Kind: settings.KindList,
			Usage: "`address` of a portal, IPv4 or [IPv6], repeatable; port 0 picks a free one " +
				"(default 0.0.0.0:3260 with CHAP, 127.0.0.1:3260 without)",
			To: settings.Landing{At: &c.Portals}},
		{Key: keyPort, Env: []string{"PORT"},
			Usage: "`port` of the portals (default 3260)",
			To:    settings.Landing{At: &c.Portals}},
		{Key: keyISCSI, Env: []string{"ISCSI"}, Default: "true", Kind: settings.KindBool,
			Usage: "serve by iSCSI; false: only by --nbd or --vhost-user"},
		{Key: keyTargetName, Env: []string{"TARGET_NAME", "WWN"},
			Default: "iqn.2017-01.io.kubevirt:wrapper",
			Usage:   "iSCSI `name` of the target",
			To:      settings.Into(&c.TargetName, parseTargetName)},
		{Key: keyBehindNAT, Env: []string{"BEHIND_NAT"}, Default: "false", Kind: settings.KindBool,
			Usage: "initiators reach the portals at other addresses, as through a Service: a " +
				"discovery names no address, and they log in where they have asked",
			To: settings.Truth(&c.BehindNAT)},
		{Key: keyInsecureNoAuth, Env: []string{"INSECURE_NO_AUTH"}, Default: "false",
			Kind: settings.KindBool,
			Usage: "allow portals beyond loopback without CHAP: whoever reaches them can read " +
				"and write every disk",
			To: settings.Truth(&c.insecure)},
	})
}

func (c *config) nbdRows() []settings.Setting {
	return settings.InSection(sectionNBD, []settings.Setting{
		{Key: keyNBD, Env: []string{"NBD_LISTEN"}, Kind: settings.KindList,
			Usage: "`address` at which the disks can be used by NBD, too: unix:PATH, or an IP " +
				"address and a port, beyond loopback with TLS only; repeatable",
			To: settings.Landing{At: &c.NBD}},
		{Key: keyNBDTLSCert, Env: []string{"NBD_TLS_CERT"}, Kind: settings.KindFile,
			Usage: "PEM `file` with the certificate for the addresses of --nbd",
			To:    settings.Text(&c.NBDTLS.Cert)},
		{Key: keyNBDTLSKey, Env: []string{"NBD_TLS_KEY"}, Kind: settings.KindFile,
			Usage: "PEM `file` with its key", To: settings.Text(&c.NBDTLS.Key)},
		{Key: keyNBDClientCA, Env: []string{"NBD_CLIENT_CA"}, Kind: settings.KindFile,
			Usage: "PEM `file` with the authorities whose certificates clients must have",
			To:    settings.Text(&c.NBDTLS.ClientCA)},
		{Key: keyVhostUser, Env: []string{"VHOST_USER_DIR"}, Kind: settings.KindDir,
			Usage: "`directory` in which each disk gets a socket, NAME.sock, for virtual " +
				"machines of this machine, by vhost-user-blk",
			To: settings.Text(&c.VhostUserDir)},
		{Key: keyKubevirtHook, Env: []string{"KUBEVIRT_HOOK"}, Kind: settings.KindBool,
			Usage: "be a hook sidecar of KubeVirt: put the disks into the domain, by NBD, and " +
				"open no port (default true where KubeVirt has started one)",
			To: settings.Landing{At: &c.Hook}},
	})
}

func (c *config) cacheRows() []settings.Setting {
	return settings.InSection(sectionRegistry, []settings.Setting{
		{Key: "cache-dir", Env: []string{"CACHE_DIR"},
			Usage: "`directory` for data fetched from registries, which the daemons of a node " +
				"may share (default .cache in the work directory)",
			Kind: settings.KindDir, To: settings.Text(&c.Streams.CacheDir)},
		{Key: "cache-size", Env: []string{"CACHE_SIZE"}, Default: "10Gi",
			Usage: "`bytes` that the cache directory takes, at least 256Mi: the least recently " +
				"used data is removed",
			To: settings.Into(&c.Streams.CacheSize, parseCacheSize)},
		{Key: keyRecordBoot, Env: []string{"RECORD_BOOT"},
			Usage: "`file` for the order of guests' reads in the first minute; push --boot-order " +
				"uses it",
			Kind: settings.KindFile, To: settings.Text(&c.RecordBoot)},
	})
}

func (c *config) trustRows() []settings.Setting {
	return settings.InSection(sectionTrust, []settings.Setting{
		{Key: "verify", Env: []string{"VERIFY"}, Default: verifyAlways,
			Usage: "`when` to verify images without chunk digests: always (fetch them first), or " +
				"when-complete (serve at once, trusting TLS until all is fetched; the LUN fails " +
				"if the content was wrong)",
			To:      settings.Into(&c.Streams.WhenComplete, parseVerify),
			Choices: []string{verifyAlways, verifyWhenComplete}},
	})
}

// hostNames is a field that takes names as browsers ask for them. Another one, such as a URL, would
// never be asked for, and its pages would be refused with the advice to name it.
func hostNames(at *[]string) settings.Landing {
	foreign := func(r rune) bool {
		return r > unicode.MaxASCII || !unicode.IsLetter(r) && !unicode.IsDigit(r) &&
			!strings.ContainsRune("-_.", r)
	}
	return settings.Landing{At: at, Set: func(given []string) error {
		for _, name := range given {
			_, err := netip.ParseAddr(strings.Trim(name, "[]")) // always answered
			if err != nil && strings.ContainsFunc(name, foreign) {
				return fmt.Errorf("%q is not the name of a host: leave out scheme, port and path, "+
					"as in disks.example.com", name)
			}
		}
		*at = given
		return nil
	}}
}

func (c *config) operatingRows() []settings.Setting {
	return settings.InSection(sectionPages, []settings.Setting{
		{Key: keyMetricsListen, Env: []string{"METRICS_LISTEN"}, Default: ":9260", Empty: true,
			Usage: "`address` of /metrics, /healthz, /readyz and /status; empty turns them off " +
				"(127.0.0.1:9260 without CHAP where the portals are on loopback)",
			To: settings.Into(&c.Pages, parsePages)},
		{Key: keyPagesHost, Env: []string{"PAGES_HOSTS"}, Kind: settings.KindList,
			Usage: "another `name` that the pages are asked for, as behind a proxy; repeatable",
			To:    hostNames(&c.PagesHosts)},
		{Key: keyReadyFile, Env: []string{"READY_FILE"}, Default: "/tmp/healthy", Empty: true,
			Usage: "`file` that exists while the LUNs can be used; empty: none",
			Kind:  settings.KindFile, To: settings.Text(&c.ReadyFile)},
		{Key: keyControlSocket, Env: []string{"CONTROL_SOCKET"}, Default: "control.sock",
			Empty: true,
			Usage: "`socket` for handover, sessions, kick, snapshot and commit, relative to the " +
				"work directory; empty: none",
			Kind: settings.KindFile, To: settings.Text(&c.ControlSocket)},
		{Key: keyLogLevel, Env: []string{"LOG_LEVEL"}, Default: "info",
			Usage:   "lowest `level` that is logged: debug, info, warn or error",
			To:      settings.Into(&c.log.Level, console.ParseLevel),
			Choices: console.Levels},
		{Key: keyLogFormat, Env: []string{"LOG_FORMAT"},
			Usage: "`format` of the log: console or json (default console on a terminal, else " +
				"json)",
			To:      settings.Into(&c.log.Format, console.ParseFormat),
			Choices: console.Formats},
	})
}

func (c *config) limitRows() []settings.Setting {
	return settings.InSection(sectionLimits, []settings.Setting{
		{Key: keyMemory, Env: []string{"MEMORY"}, Default: "64Mi",
			Usage: "`bytes` of data in flight of all sessions together, and of what --disk " +
				"keeps, at least 4Mi; commands beyond it are asked to try again",
			To: settings.Into(&c.Memory, parseMemory)},
		{Key: "max-sessions", Env: []string{"MAX_SESSIONS"}, Default: "1024",
			Usage: "`number` of sessions at once, by iSCSI and by NBD",
			To:    settings.Into(&c.Limits.MaxConnections, upTo(target.MostConnections))},
		{Key: "max-sessions-per-address", Env: []string{"MAX_SESSIONS_PER_ADDRESS"}, Default: "256",
			Usage: "`number` of sessions at once from one IPv4 address or /64 of IPv6, or " +
				"of one client by NBD",
			To: settings.Into(&c.Limits.MaxPerAddress, upTo(target.MostConnections))},
		unpackSetting(&c.UnpackMemory, "16Mi"),
	})
}

// singleRows are settings of single disks only: the YAML file has them under the names of images.
func (c *config) singleRows() []settings.Setting {
	disk := &c.Settings.Disk
	return []settings.Setting{
		{Key: "lun", Scope: settings.ForOneDisk, To: settings.Into(&disk.LUN, parseLUN)},
		{Key: keyFormat, Scope: settings.ForOneDisk, To: settings.Into(&disk.Format, parseFormat)},
		{Key: "serial", Scope: settings.ForOneDisk,
			To: settings.Into(&disk.Identity.Serial, parseSerial)},
		{Key: "naa", Scope: settings.ForOneDisk, To: settings.Into(&disk.Identity.NAA, parseNAA)},
		{Key: keyReadOnly, Scope: settings.ForOneDisk, To: settings.Truth(&disk.ReadOnly)},
		{Key: keyUsageType, Scope: settings.ForOneDisk,
			To: settings.Into(&disk.UsageType, parseUsageType)},
	}
}

// knownSettings are all settings of all commands that the YAML file may have.
func knownSettings() []settings.Setting {
	return slices.Concat(newConfig().settings(), provideSettings(new(providing)))
}

// loader has the settings of a command while they are checked.
type loader struct{ *settings.Loader }

// load finds settings, and stores their values in their fields.
func load(flags *pflag.FlagSet, rows []settings.Setting) loader {
	l := loadBy(osfile.ReadText, flags, rows)
	l.Land(rows)
	return l
}

// loadBy finds settings, and reads files with the given function. It stores no value yet.
func loadBy(read settings.Reader, flags *pflag.FlagSet, rows []settings.Setting) loader {
	all := knownSettings()
	return loader{settings.Load(read, flags, rows, settings.Known{Rows: all,
		Disks: newConfig().diskSettings(),
		Hint:  func(key string) string { return unknownKeyHint(key, all) }})}
}

// nameOf names a setting in messages, as a flag and as a variable: in a container, people mostly
// set the variable.
func nameOf(key string) string {
	row, _ := settings.Find(knownSettings(), key)
	return named(row).String()
}

// named returns a setting with its name in messages.
func named(s settings.Setting) options.Setting {
	return options.Setting{Key: s.Key, Flag: "--" + s.Key, Variable: strings.Join(s.Env, ", "),
		Field: s.To.At}
}

// table returns which setting is for which field of o, for the daemon's messages.
func table(o *options.Options) []options.Setting {
	all := []options.Setting{
		{Key: settings.KeyDisks, Flag: `"` + settings.KeyDisks + `" in the configuration file`,
			Field: &o.Settings.Disks},
		{Flag: "CHAP_USERNAME and CHAP_PASSWORD", Field: &o.CHAP},
	}
	for _, row := range (&config{Options: o}).rows() {
		all = append(all, named(row))
	}
	return all
}

// unknownKeyHint helps with the likely mistakes: a misspelt key, or a credential in the file.
func unknownKeyHint(key string, known []settings.Setting) string {
	if looksLikeCredential(key) {
		return ": " + credentialsHint
	}
	kebab := strings.ReplaceAll(strings.ToLower(key), "_", "-")
	switch _, ok := settings.Find(known, kebab); {
	case ok && kebab != key:
		return fmt.Sprintf(": write %q", kebab)
	case ok:
		return ""
	}
	return didYouMean(kebab, "", wordsAsCommands(settings.Keys(known)))
}

const credentialsHint = "CHAP credentials come from the environment (CHAP_USERNAME, " +
	"CHAP_PASSWORD) or from files (CHAP_PASSWORD_FILE)"

func looksLikeCredential(name string) bool {
	words := []string{"password", "secret", "chap", "username"}
	return slices.ContainsFunc(words, func(word string) bool {
		return strings.Contains(strings.ToLower(name), word)
	})
}
