package daemon

// Setting is something that messages of a daemon ask a person to change.
type Setting string

// The settings, called by their keys in the configuration file.
const (
	SettingImageDir      Setting = "disk-dir"
	SettingWorkDir       Setting = "work-dir"
	SettingPersistentDir Setting = "persistent-dir"
	SettingUsageType     Setting = "usage-type"
	SettingLeftovers     Setting = "leftovers"
	SettingCacheDir      Setting = "cache-dir"
	SettingCopyMode      Setting = "copy-mode"
	SettingPortals       Setting = "listen"
	SettingPort          Setting = "port" // of the portals
	SettingPages         Setting = "metrics-listen"
	SettingPagesHost     Setting = "pages-host"
	SettingReadyFile     Setting = "ready-file"
	SettingControlSocket Setting = "control-socket"
	SettingRecordBoot    Setting = "record-boot"
	SettingDisks         Setting = "disks" // of single disks
	SettingCredentials   Setting = "credentials"
	SettingVolumes       Setting = "volumes-listen"
	SettingVolumesDir    Setting = "volumes-dir"
	SettingVolumesClaim  Setting = "volumes-claim"
)

// Name is how a person changes a setting: with a flag, or in a container mostly with a variable.
type Name struct {
	Flag     string // as "--copy-mode", or the name of a setting without a flag
	Variable string // as "COPY_MODE"; may be empty
}

func (n Name) String() string { return n.Flag + n.variable() }

// with is the text that sets it to a value.
func (n Name) with(value string) string { return n.Flag + "=" + value + n.variable() }

func (n Name) variable() string {
	if n.Variable == "" {
		return ""
	}
	return " (" + n.Variable + ")"
}

// names has the name of each setting.
type names map[Setting]Name

func (n names) of(s Setting) Name {
	if name, ok := n[s]; ok {
		return name
	}
	return Name{Flag: string(s)}
}
