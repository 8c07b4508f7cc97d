package xml

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/pflag"

	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/pages"
)

const (
	flagVhostUser     = "vhost-user"
	flagQueues        = "queues"
	flagMemoryBacking = "memory-backing"

	// vhostUserAuto chooses the socket of the daemon at --status-url.
	vhostUserAuto = "auto"
)

// vhostUserFlags are the flags of xml for a disk by vhost-user.
type vhostUserFlags struct {
	socket        string
	queues        uint
	memoryBacking bool
}

func (f *vhostUserFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&f.socket, flagVhostUser, "", "`path` of the disk's socket for vhost-user, "+
		"which is used instead of iSCSI; auto is that of the daemon at --status-url")
	flags.UintVar(&f.queues, flagQueues, 0,
		"how many `queues` a disk by --vhost-user has (default: QEMU's, one for each vCPU)")
	flags.BoolVar(&f.memoryBacking, flagMemoryBacking, false,
		"print the <memoryBacking> element that a domain with such disks needs, and no other")
}

// isGiven reports whether the flags are about a disk by vhost-user.
func (f *vhostUserFlags) isGiven(flags *pflag.FlagSet) bool {
	return flags.Changed(flagVhostUser) || flags.Changed(flagQueues) || f.memoryBacking
}

// vhostUserDocument returns the element for a disk by vhost-user.
func (f *Flags) vhostUserDocument(ctx context.Context, l *settings.Loader) (string, error) {
	const instead = "leave it out, or leave out --" + flagVhostUser
	refuse(l, forISCSI, "is about iSCSI: "+instead)
	refuse(l, []string{flagNBD, flagExport, flagTLS}, "is about NBD: "+instead)
	refuse(l, []string{flagSerial, flagWWN, flagReadOnly, settings.KeyAccessMode},
		"libvirt takes none for a vhost-user disk, which the daemon decides: "+instead)
	if f.vhostUser.memoryBacking {
		return libvirt.SharedMemoryXML, l.Problems.Err()
	}
	v := libvirt.VhostUser{Socket: f.vhostUser.socket, Reconnect: time.Second}
	switch asked := l.Flags.Changed(flagStatusURL); {
	case v.Socket == "":
		l.Problems.AddMissing("--"+flagVhostUser, "want the path of a socket")
	case v.Socket != vhostUserAuto:
		if asked {
			l.Problems.Add("--"+flagStatusURL, "is not asked for a socket that is named: leave it "+
				"out, or give --%s %s", flagVhostUser, vhostUserAuto)
		}
	case !asked:
		l.Problems.Add("--"+flagVhostUser, "auto needs a daemon to ask (--%s)", flagStatusURL)
	default:
		said, _, err := f.ask(ctx, l)
		if err != nil {
			return "", err
		}
		served, err := f.choose(said, l)
		if err != nil {
			return "", err
		}
		if v = pages.VhostUserForLibvirt(&served); v.Socket == "" {
			return "", fmt.Errorf("the daemon has no socket for vhost-user for LUN %d (%s): start "+
				"it with --%s DIR", served.LUN, served.Image, flagVhostUser)
		}
	}
	v.Queues = f.vhostUser.queues
	if l.Flags.Changed(flagReconnect) {
		v.Reconnect = f.nbd.reconnect
	}
	if err := l.Problems.Err(); err != nil {
		return "", err
	}
	text, err := v.DiskXML(f.device)
	return text, explainFields(l, err)
}
