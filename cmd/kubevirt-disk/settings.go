package main

import (
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// setting is one row of the contract: a flag, its environment variables, and the key of the YAML
// file, which is the flag's name. A flag wins over the environment, the environment over the file,
// and the file over the default.
type setting struct {
	key   string   // flag and YAML key
	env   []string // if several are set, they must agree
	def   string
	usage string // the word in backquotes names the value
	kind  kind
	empty bool // an empty value means something: off, or none
}

type kind uint8

const (
	kindText kind = iota
	kindBool
	kindList
	kindLines // a list whose elements may have commas and spaces
)

const (
	keyDiskDir        = "disk-dir"
	keyWorkDir        = "work-dir"
	keyPersistentDir  = "persistent-dir"
	keyListen         = "listen"
	keyPort           = "port"
	keyBehindNAT      = "behind-nat"
	keyTargetName     = "target-name"
	keyCopyMode       = "copy-mode"
	keyAccessMode     = "access-mode"
	keyMetricsListen  = "metrics-listen"
	keyPagesHost      = "pages-host"
	keyReadyFile      = "ready-file"
	keyLogLevel       = "log-level"
	keyLogFormat      = "log-format"
	keyInsecureNoAuth = "insecure-no-auth"
	keyLeftovers      = "leftovers"
	keyOnImageChange  = "on-image-change"
	keySize           = "size"
	keyEphemeralFlush = "ephemeral-flush"
	keyControlSocket  = "control-socket"
	keyMemory         = "memory"
	keyMaxSessions    = "max-sessions"
	keyMaxPerAddress  = "max-sessions-per-address"
	keyImage          = "image"
	keyContainerImage = "container-image"
	keyCacheDir       = "cache-dir"
	keyCacheSize      = "cache-size"
	keyRecordBoot     = "record-boot"
	keyUsageType      = "usage-type"
	keyPodAnnotations = "pod-annotations"
	keyVerify         = "verify"

	flagConfig = "config"
	envConfig  = "KUBEVIRT_DISK_CONFIG"
)

const (
	defaultPort        = 3260
	defaultMetricsPort = 9260
)

// settings are all rows of the contract, in the order of the help text.
var settings = append([]setting{
	{key: keyDiskDir, env: []string{"DISK_DIR"}, def: "/disk",
		usage: "`directory` of the images to serve: sorted naturally, LUN 1, 2, ..."},
	{key: keyWorkDir, env: []string{"WORK_DIR"}, def: "/var/lib/kubevirt-disk",
		usage: "`directory` for the disks' copied and written data, and their state"},
	{key: keyPersistentDir, env: []string{"PERSISTENT_DIR"}, empty: true,
		usage: "`directory` of a mounted volume on which disks survive: disk.img for one image, " +
			"a directory for each of several"},
	{key: keyUsageType, env: []string{"USAGE_TYPES"}, kind: kindList,
		usage: "`NAME=DIRECTORY` of storage that disks can choose for their written data, under " +
			"disks in the YAML file; repeatable"},
	{key: keyPodAnnotations, env: []string{"POD_ANNOTATIONS"},
		usage: "`file` of the downward API with the pod's annotations: " + usageTypeAnnotation +
			"NAME adds a usage type"},
	{key: keyOnImageChange, env: []string{"ON_IMAGE_CHANGE"}, def: "fail",
		usage: "what to do if the image of a persistent disk has changed: `action` fail, or keep " +
			"(serve it as it is)"},
	{key: keyLeftovers, env: []string{"LEFTOVERS"},
		usage: "what to do with disks outside of a persistent directory if their images are gone " +
			"or have changed: `action` keep (set them aside, with what guests wrote) or remove " +
			"(default keep if --work-dir is given, remove otherwise)"},
	{key: keyListen, env: []string{"LISTEN"}, kind: kindList,
		usage: "`address` of a portal, IPv4 or [IPv6], repeatable; port 0 picks a free one " +
			"(default 0.0.0.0:3260 with CHAP, 127.0.0.1:3260 without)"},
	{key: keyPort, env: []string{"PORT"},
		usage: "`port` of the portals (default 3260)"},
	{key: keyBehindNAT, env: []string{"BEHIND_NAT"}, def: "false", kind: kindBool,
		usage: "initiators reach the portals at other addresses, as through a Service: a " +
			"discovery names no address, and they log in where they have asked"},
	{key: keyTargetName, env: []string{"TARGET_NAME", "WWN"},
		def:   "iqn.2017-01.io.kubevirt:wrapper",
		usage: "iSCSI `name` of the target"},
	{key: keyCopyMode, env: []string{"COPY_MODE"}, def: "clone",
		usage: "what is copied of an image: `mode` clone (everything, in the background), " +
			"copy-on-read, copy-on-write, or none (raw image, served in place)"},
	{key: keySize, env: []string{"SIZE"},
		usage: "`bytes` of each disk, as 20Gi: at least the image's, never less than before " +
			"(default the image's)"},
	{key: keyEphemeralFlush, env: []string{"EPHEMERAL_FLUSH"}, def: "false", kind: kindBool,
		usage: "let a flush of a disk that dies with the pod reach storage, so that it survives " +
			"a crash of the machine"},
	{key: keyAccessMode, env: []string{"ACCESS_MODE"}, def: "write-exclusive",
		usage: "who may use a LUN at once: `mode` write-exclusive, write-shared or read-shared"},
	{key: keyMetricsListen, env: []string{"METRICS_LISTEN"}, def: ":9260", empty: true,
		usage: "`address` of /metrics, /healthz, /readyz and /status; empty turns them off " +
			"(127.0.0.1:9260 without CHAP where the portals are on loopback)"},
	{key: keyPagesHost, env: []string{"PAGES_HOSTS"}, kind: kindList,
		usage: "another `name` that the pages are asked for, as behind a proxy; repeatable"},
	{key: keyReadyFile, env: []string{"READY_FILE"}, def: "/tmp/healthy", empty: true,
		usage: "`file` that exists while the LUNs can be used; empty: none"},
	{key: keyControlSocket, env: []string{"CONTROL_SOCKET"}, def: "control.sock", empty: true,
		usage: "`socket` for handover, sessions and kick, relative to the work directory; empty: " +
			"none"},
	{key: keyMemory, env: []string{"MEMORY"}, def: "64Mi",
		usage: "`bytes` of data in flight of all sessions together, at least 4Mi; commands " +
			"beyond it are asked to try again"},
	{key: keyMaxSessions, env: []string{"MAX_SESSIONS"}, def: "1024",
		usage: "`number` of sessions at once"},
	{key: keyMaxPerAddress, env: []string{"MAX_SESSIONS_PER_ADDRESS"}, def: "256",
		usage: "`number` of sessions at once from one IPv4 address or 64-bit IPv6 network"},
	{key: keyLogLevel, env: []string{"LOG_LEVEL"}, def: "info",
		usage: "lowest `level` that is logged: debug, info, warn or error"},
	{key: keyLogFormat, env: []string{"LOG_FORMAT"},
		usage: "`format` of the log: console or json (default console on a terminal, else json)"},
	{key: keyInsecureNoAuth, env: []string{"INSECURE_NO_AUTH"}, def: "false", kind: kindBool,
		usage: "allow portals beyond loopback without CHAP: whoever reaches them can read and " +
			"write every disk"},
	{key: keyImage, env: []string{"IMAGE"}, kind: kindList,
		usage: "`reference` of an image in a registry: its disks are LUNs after those of the " +
			"directory, " +
			"and are fetched as they are read; repeatable"},
	{key: keyContainerImage, env: []string{"CONTAINER_IMAGE"}, kind: kindList,
		usage: "`reference` of a container image: it becomes a disk that boots and runs its " +
			"entry point, a LUN after those of --image; repeatable"},
	{key: keyCacheDir, env: []string{"CACHE_DIR"},
		usage: "`directory` for data fetched from registries, which the daemons of a node may " +
			"share (default .cache in the work directory)"},
	{key: keyCacheSize, env: []string{"CACHE_SIZE"}, def: "10Gi",
		usage: "`bytes` that the cache directory takes, at least 256Mi: the least recently used " +
			"data is removed"},
	{key: keyRecordBoot, env: []string{"RECORD_BOOT"},
		usage: "`file` for the order of guests' reads in the first minute; push --boot-order " +
			"uses it"},
	{key: keyVerify, env: []string{"VERIFY"}, def: verifyAlways,
		usage: "`when` to verify images without chunk digests: always (fetch them first), or " +
			"when-complete (serve at once, trusting TLS until all is fetched; the LUN fails if " +
			"the content was wrong)"},
}, slices.Concat(machineSettings, registrySettings, volumeSettings)...)

// addFlags registers --config and the flags of the given settings; without keys, of all settings.
func addFlags(flags *pflag.FlagSet, keys ...string) {
	flags.SortFlags = false
	addSettings(flags, selectSettings(keys))
	flags.String(flagConfig, "", "YAML `file` with any of these settings, keyed by the flags' "+
		"names ["+envConfig+"]")
}

// addSettings registers the flags of settings.
func addSettings(flags *pflag.FlagSet, rows []setting) {
	for _, s := range rows {
		usage := s.usage + " [" + strings.Join(s.env, ", ") + "]"
		switch s.kind {
		case kindBool:
			flags.Bool(s.key, s.def == "true", usage)
		case kindList:
			flags.StringSlice(s.key, nil, usage)
		case kindLines:
			flags.StringArray(s.key, nil, usage)
		default:
			flags.String(s.key, s.def, usage)
		}
	}
}

// selectSettings returns the rows of the given keys; without keys, all rows of serve.
func selectSettings(keys []string) []setting {
	if len(keys) == 0 {
		return settings
	}
	var rows []setting
	for _, s := range slices.Concat(settings, provideSettings) {
		for _, key := range keys {
			if s.key == key {
				rows = append(rows, s)
			}
		}
	}
	return rows
}

// nameOf names a setting in messages, as flag and as variable: in a container, people mostly set
// the variable.
func nameOf(key string) string {
	row := selectSettings([]string{key})[0]
	return "--" + key + " (" + strings.Join(row.env, ", ") + ")"
}

func isSetting(key string) bool { return len(selectSettings([]string{key})) > 0 }
