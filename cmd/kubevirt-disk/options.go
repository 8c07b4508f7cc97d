package main

import (
	"strings"

	"go.uber.org/zap"

	"kubevirt.io/disk/internal/daemon"
)

// options are the daemon's options for this configuration.
func (c *config) options(log *zap.Logger) daemon.Options {
	opt := daemon.Options{
		Settings:       c.diskSettings(),
		Streams:        c.streams,
		Volumes:        c.volumes,
		Containers:     c.containers,
		WorkDir:        c.workDir,
		WorkDirNamed:   c.workDirNamed,
		Leftovers:      c.leftovers,
		PersistentDir:  c.persistentDir,
		UsageTypes:     c.usageTypes,
		OnImageChange:  c.onImageChange,
		EphemeralFlush: c.ephemeralFlush,
		Owner:          c.owner(),
		TargetName:     c.targetName,
		Portals:        c.portals,
		BehindNAT:      c.behindNAT,
		CHAP:           c.chap,
		Limits:         c.limits,
		Pages:          c.metricsListen,
		PagesHosts:     c.pagesHosts,
		ReadyFile:      c.readyFile,
		ControlSocket:  c.controlSocket,
		RecordBoot:     c.recordBoot,
		Build:          buildInfo(),
		Log:            log,
		Names:          settingNames(),
	}
	if len(c.images) > 0 {
		opt.Images.Paths = c.images
	} else {
		opt.Images.Dir = c.diskDir
	}
	return opt
}

// diskSettings are the settings that can change while the daemon runs.
func (c *config) diskSettings() daemon.Settings {
	return daemon.Settings{Disk: c.common, Disks: c.disks}
}

// settingNames says how a person changes the settings that the daemon's messages name.
func settingNames() map[daemon.Setting]daemon.Name {
	names := map[daemon.Setting]daemon.Name{
		daemon.SettingDisks:       {Flag: `"` + keyDisks + `" in the configuration file`},
		daemon.SettingCredentials: {Flag: "CHAP_USERNAME and CHAP_PASSWORD"},
	}
	for _, row := range settings {
		names[daemon.Setting(row.key)] = daemon.Name{
			Flag: "--" + row.key, Variable: strings.Join(row.env, ", "),
		}
	}
	return names
}
