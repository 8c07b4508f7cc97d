package main

import (
	"slices"

	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/registry/transport"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/target"
)

const (
	keyDiskDir        = "disk-dir"
	keyWorkDir        = "work-dir"
	keyListen         = "listen"
	keyPort           = "port"
	keyISCSI          = "iscsi"
	keyNBD            = "nbd"
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
	keyTargetName     = "target-name"
	keyCopyMode       = "copy-mode"
	keyAccessMode     = "access-mode"
	keyMetricsListen  = "metrics-listen"
	keyReadyFile      = "ready-file"
	keyLogLevel       = "log-level"
	keyLogFormat      = "log-format"
	keySize           = "size"
	keyBlockSize      = "block-size"
	keyControlSocket  = "control-socket"
	keyContainerImage = "container-image"
	keyUsageType      = "usage-type"
	keyPodAnnotations = "pod-annotations"

	flagConfig = "config"
	envConfig  = "KUBEVIRT_DISK_CONFIG"
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

// firstSettings are those that the help of serve shows if it is not asked for all.
var firstSettings = []string{keyDiskDir, "image", keyCopyMode, keySize, keyAccessMode, keyWorkDir,
	keyPersistentDir, keyListen, keyNBD, keyLogLevel}

const (
	defaultPort        = 3260
	defaultMetricsPort = 9260
)

// settings are all rows of serve but those of single disks, in the order of the help text.
func (c *config) settings() []setting {
	return only(c.rows(), func(s setting) bool { return s.scope != ofSingleOne })
}

// diskSettings are the rows that a single disk can have in the YAML file.
func (c *config) diskSettings() []setting {
	return only(c.rows(), func(s setting) bool { return s.scope != ofDaemon })
}

// rows are all rows of serve, by section.
func (c *config) rows() []setting {
	volumes := c.Volumes
	if volumes == nil {
		volumes = new(options.Volumes)
	}
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

func (c *config) diskRows() []setting {
	disk := &c.Settings.Disk
	return in(sectionDisks, []setting{
		{key: keyDiskDir, env: []string{"DISK_DIR"}, def: "/disk",
			usage: "`directory` of the images to serve: sorted naturally, LUN 1, 2, ...",
			kind:  kindDir, to: text(&c.Images.Dir)},
		{key: "image", env: []string{"IMAGE"}, kind: kindList,
			usage: "`reference` of an image in a registry, or https://... of a disk: LUNs after " +
				"those of the directory, fetched as they are read; repeatable",
			to: references(&c.Streams.References, transport.ParseSource)},
		{key: keyContainerImage, env: []string{"CONTAINER_IMAGE"}, kind: kindList,
			usage: "`reference` of a container image: it becomes a disk that boots and runs its " +
				"entry point, a LUN after those of --image; repeatable",
			to: references(&c.Containers.References, transport.ParseReference)},
		{key: keyDisk, env: []string{"DISK"}, kind: kindList,
			usage: "`URI` of a disk that another kubevirt-disk serves by NBD, as in " +
				"nbds://HOST/EXPORT: a LUN after those of images; repeatable",
			to: remotes(&c.Remotes.Disks)},
		{key: keyDiskTLSCert, env: []string{"DISK_TLS_CERT"}, kind: kindFile,
			usage: "PEM `file` with the certificate that servers of --disk know this daemon by",
			to:    text(&c.Remotes.Cert)},
		{key: keyDiskTLSKey, env: []string{"DISK_TLS_KEY"}, kind: kindFile,
			usage: "PEM `file` with its key", to: text(&c.Remotes.Key)},
		{key: keyDiskServerCA, env: []string{"DISK_SERVER_CA"}, kind: kindFile,
			usage: "PEM `file` with who has signed the certificates of these servers (default " +
				"the authorities of the system)",
			to: text(&c.Remotes.ServerCA)},
		{key: keyCopyMode, env: []string{"COPY_MODE"}, def: "clone",
			usage: "what is copied of an image: `mode` clone (everything, in the background), " +
				"copy-on-read, copy-on-write, or none (raw image, served in place)",
			to: into(&disk.CopyMode, instance.ParseCopyMode),
			choices: texts(instance.CopyClone, instance.CopyOnRead, instance.CopyOnWrite,
				instance.CopyNone), scope: ofDisks},
		{key: keySize, env: []string{"SIZE"},
			usage: "`bytes` of each disk, as 20Gi: at least the image's, never less than before " +
				"(default the image's)",
			to: into(&disk.Size, parseSize), scope: ofDisks},
		{key: keyBlockSize, env: []string{"BLOCK_SIZE"},
			usage: "`bytes` of a logical block: 512, or 4096 for images that were made with such " +
				"blocks (default what the disk has had so far, or 512)",
			to: into(&disk.BlockSize, parseBlockSize), scope: ofDisks,
			choices: []string{"512", "4096"}},
		{key: keyAccessMode, env: []string{"ACCESS_MODE"}, def: "write-exclusive",
			usage: "who may use a LUN at once: `mode` write-exclusive, write-shared or read-shared",
			to:    into(&disk.AccessMode, serving.ParseAccessMode),
			choices: texts(serving.AccessWriteExclusive, serving.AccessWriteShared,
				serving.AccessReadShared), scope: ofDisks},
	})
}

func (c *config) placeRows() []setting {
	return in(sectionPlaces, []setting{
		{key: keyWorkDir, env: []string{"WORK_DIR"}, def: "/var/lib/kubevirt-disk",
			usage: "`directory` for the disks' copied and written data, and their state",
			kind:  kindDir, to: text(&c.WorkDir)},
		{key: keyPersistentDir, env: []string{"PERSISTENT_DIR"}, empty: true,
			usage: "`directory` of a mounted volume on which disks survive: disk.img for one " +
				"image, a directory for each of several",
			kind: kindDir, to: text(&c.PersistentDir)},
		{key: keyUsageType, env: []string{"USAGE_TYPES"}, kind: kindList,
			usage: "`NAME=DIRECTORY` of storage that disks can choose for their written data, " +
				"under disks in the YAML file; repeatable",
			to: landing{at: &c.UsageTypes}},
		{key: keyPodAnnotations, env: []string{"POD_ANNOTATIONS"},
			usage: "`file` of the downward API with the pod's annotations: " + usageTypeAnnotation +
				"NAME adds a usage type",
			kind: kindFile, to: text(&c.annotations)},
		{key: "on-image-change", env: []string{"ON_IMAGE_CHANGE"}, def: "fail",
			usage: "what to do if the image of a persistent disk has changed: `action` fail, or " +
				"keep (serve it as it is)",
			to:      into(&c.OnImageChange, instance.ParseImageChange),
			choices: texts(instance.ImageChangeFail, instance.ImageChangeKeep)},
		{key: "leftovers", env: []string{"LEFTOVERS"},
			usage: "what to do with disks outside of a persistent directory if their images are " +
				"gone or have changed: `action` keep (set them aside, with what guests wrote) or " +
				"remove (default keep if --work-dir is given, remove otherwise)",
			to:      into(&c.Leftovers, instance.ParseLeftovers),
			choices: texts(instance.LeftoversKeep, instance.LeftoversRemove)},
		{key: "ephemeral-flush", env: []string{"EPHEMERAL_FLUSH"}, def: "false", kind: kindBool,
			usage: "let a flush of a disk that dies with the pod reach storage, so that it " +
				"survives a crash of the machine",
			to: truth(&c.EphemeralFlush)},
	})
}

func (c *config) iscsiRows() []setting {
	return in(sectionISCSI, []setting{
		{key: keyListen, env: []string{"LISTEN"}, kind: kindList,
			usage: "`address` of a portal, IPv4 or [IPv6], repeatable; port 0 picks a free one " +
				"(default 0.0.0.0:3260 with CHAP, 127.0.0.1:3260 without)",
			to: landing{at: &c.Portals}},
		{key: keyPort, env: []string{"PORT"},
			usage: "`port` of the portals (default 3260)",
			to:    landing{at: &c.Portals}},
		{key: keyISCSI, env: []string{"ISCSI"}, def: "true", kind: kindBool,
			usage: "serve by iSCSI; false: only by --nbd", to: landing{at: &c.Portals}},
		{key: keyTargetName, env: []string{"TARGET_NAME", "WWN"},
			def:   "iqn.2017-01.io.kubevirt:wrapper",
			usage: "iSCSI `name` of the target",
			to:    into(&c.TargetName, parseTargetName)},
		{key: "behind-nat", env: []string{"BEHIND_NAT"}, def: "false", kind: kindBool,
			usage: "initiators reach the portals at other addresses, as through a Service: a " +
				"discovery names no address, and they log in where they have asked",
			to: truth(&c.BehindNAT)},
		{key: "insecure-no-auth", env: []string{"INSECURE_NO_AUTH"}, def: "false", kind: kindBool,
			usage: "allow portals beyond loopback without CHAP: whoever reaches them can read " +
				"and write every disk",
			to: truth(&c.insecure)},
	})
}

func (c *config) nbdRows() []setting {
	return in(sectionNBD, []setting{
		{key: keyNBD, env: []string{"NBD_LISTEN"}, kind: kindList,
			usage: "`address` at which the disks can be used by NBD, too: unix:PATH, or an IP " +
				"address and a port, beyond loopback with TLS only; repeatable",
			to: landing{at: &c.NBD}},
		{key: keyNBDTLSCert, env: []string{"NBD_TLS_CERT"}, kind: kindFile,
			usage: "PEM `file` with the certificate for the addresses of --nbd",
			to:    text(&c.NBDTLS.Cert)},
		{key: keyNBDTLSKey, env: []string{"NBD_TLS_KEY"}, kind: kindFile,
			usage: "PEM `file` with its key", to: text(&c.NBDTLS.Key)},
		{key: keyNBDClientCA, env: []string{"NBD_CLIENT_CA"}, kind: kindFile,
			usage: "PEM `file` with the authorities whose certificates clients must have",
			to:    text(&c.NBDTLS.ClientCA)},
		{key: keyKubevirtHook, env: []string{"KUBEVIRT_HOOK"}, kind: kindBool,
			usage: "be a hook sidecar of KubeVirt: put the disks into the domain, by NBD, and " +
				"open no port (default true where KubeVirt has started one)",
			to: landing{at: &c.Hook}},
	})
}

func (c *config) cacheRows() []setting {
	return in(sectionRegistry, []setting{
		{key: "cache-dir", env: []string{"CACHE_DIR"},
			usage: "`directory` for data fetched from registries, which the daemons of a node " +
				"may share (default .cache in the work directory)",
			kind: kindDir, to: text(&c.Streams.CacheDir)},
		{key: "cache-size", env: []string{"CACHE_SIZE"}, def: "10Gi",
			usage: "`bytes` that the cache directory takes, at least 256Mi: the least recently " +
				"used data is removed",
			to: into(&c.Streams.CacheSize, parseCacheSize)},
		{key: "record-boot", env: []string{"RECORD_BOOT"},
			usage: "`file` for the order of guests' reads in the first minute; push --boot-order " +
				"uses it",
			kind: kindFile, to: text(&c.RecordBoot)},
	})
}

func (c *config) trustRows() []setting {
	return in(sectionTrust, []setting{
		{key: "verify", env: []string{"VERIFY"}, def: verifyAlways,
			usage: "`when` to verify images without chunk digests: always (fetch them first), or " +
				"when-complete (serve at once, trusting TLS until all is fetched; the LUN fails " +
				"if the content was wrong)",
			to:      into(&c.Streams.WhenComplete, parseVerify),
			choices: []string{verifyAlways, verifyWhenComplete}},
	})
}

func (c *config) operatingRows() []setting {
	return in(sectionPages, []setting{
		{key: keyMetricsListen, env: []string{"METRICS_LISTEN"}, def: ":9260", empty: true,
			usage: "`address` of /metrics, /healthz, /readyz and /status; empty turns them off " +
				"(127.0.0.1:9260 without CHAP where the portals are on loopback)",
			to: into(&c.Pages, parsePages)},
		{key: "pages-host", env: []string{"PAGES_HOSTS"}, kind: kindList,
			usage: "another `name` that the pages are asked for, as behind a proxy; repeatable",
			to:    list(&c.PagesHosts)},
		{key: keyReadyFile, env: []string{"READY_FILE"}, def: "/tmp/healthy", empty: true,
			usage: "`file` that exists while the LUNs can be used; empty: none",
			kind:  kindFile, to: text(&c.ReadyFile)},
		{key: keyControlSocket, env: []string{"CONTROL_SOCKET"}, def: "control.sock", empty: true,
			usage: "`socket` for handover, sessions, kick, snapshot and commit, relative to the " +
				"work directory; empty: none",
			kind: kindFile, to: text(&c.ControlSocket)},
		{key: keyLogLevel, env: []string{"LOG_LEVEL"}, def: "info",
			usage:   "lowest `level` that is logged: debug, info, warn or error",
			to:      into(&c.log.Level, console.ParseLevel),
			choices: console.Levels},
		{key: keyLogFormat, env: []string{"LOG_FORMAT"},
			usage: "`format` of the log: console or json (default console on a terminal, else " +
				"json)",
			to:      into(&c.log.Format, console.ParseFormat),
			choices: console.Formats},
	})
}

func (c *config) limitRows() []setting {
	return in(sectionLimits, []setting{
		{key: keyMemory, env: []string{"MEMORY"}, def: "64Mi",
			usage: "`bytes` of data in flight of all sessions together, and of what --disk " +
				"keeps, at least 4Mi; commands beyond it are asked to try again",
			to: into(&c.Memory, parseMemory)},
		{key: "max-sessions", env: []string{"MAX_SESSIONS"}, def: "1024",
			usage: "`number` of sessions at once, by iSCSI and by NBD",
			to:    into(&c.Limits.MaxConnections, upTo(target.MostConnections))},
		{key: "max-sessions-per-address", env: []string{"MAX_SESSIONS_PER_ADDRESS"}, def: "256",
			usage: "`number` of sessions at once from one IPv4 address or /64 of IPv6, or " +
				"of one client by NBD",
			to: into(&c.Limits.MaxPerAddress, upTo(target.MostConnections))},
		unpackSetting(&c.UnpackMemory, "16Mi"),
	})
}

// singleRows are of single disks only: the YAML file has them under the names of images.
func (c *config) singleRows() []setting {
	disk := &c.Settings.Disk
	return []setting{
		{key: "lun", scope: ofSingleOne, to: into(&disk.LUN, parseLUN)},
		{key: keyFormat, scope: ofSingleOne, to: into(&disk.Format, parseFormat)},
		{key: "serial", scope: ofSingleOne, to: into(&disk.Identity.Serial, parseSerial)},
		{key: "naa", scope: ofSingleOne, to: into(&disk.Identity.NAA, parseNAA)},
		{key: keyReadOnly, scope: ofSingleOne, to: truth(&disk.ReadOnly)},
		{key: keyUsageType, scope: ofSingleOne, to: into(&disk.UsageType, parseUsageType)},
	}
}
