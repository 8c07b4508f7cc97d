package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/cli/xml"
	"kubevirt.io/disk/internal/osfile"
)

func (a *app) xmlCommand() *cobra.Command {
	var f xml.Flags
	cmd := &cobra.Command{
		Use:   "xml",
		Short: "Print the libvirt XML by which a virtual machine uses a LUN",
		Long: `Prints the <disk> element with which a libvirt domain uses a LUN, or with --secret the
<secret> element that it refers to. A running daemon (--status-url) or flags describe the LUN.
Neither element has the password: libvirt gets it from a file.

  kubevirt-disk xml --status-url http://10.0.0.5:9260 --chap-username vm --domain DOMAIN >disk.xml
  kubevirt-disk xml --status-url http://10.0.0.5:9260 --secret >secret.xml
  virsh secret-define secret.xml
  virsh secret-set-value UUID --file password --plain
  virsh attach-device DOMAIN disk.xml

QEMU logs in with an initiator name made of this machine's name and --domain, so run the command on
the domain's machine. In a live migration the destination needs another name than the source, or the
source cannot be fenced. The machine's name is NODE_NAME or POD_NAME from the environment, or else
the hostname. Two domains of one machine need --domain to be kept apart.

With --nbd the disk is used by NBD, which needs neither a secret nor an initiator name:

  kubevirt-disk xml --nbd unix:/run/disk/nbd.sock >disk.xml
  kubevirt-disk xml --status-url http://10.0.0.5:9260 --nbd auto >disk.xml

With --vhost-user it is used by vhost-user, which also needs a <memoryBacking> in the domain:

  kubevirt-disk xml --vhost-user /run/disks/fedora.qcow2.sock >disk.xml
  kubevirt-disk xml --memory-backing >memory.xml

With --file it prints the <disk> element for an image in a local file, as the command provide makes
it. With --overlay, QEMU writes to that file, which lies over the image (--copy-mode):

  qemu-img create -f qcow2 -F qcow2 -b /vm/disk.qcow2 /storage/ssd/vm.qcow2
  kubevirt-disk xml --file /vm/disk.qcow2 --overlay /storage/ssd/vm.qcow2 >disk.xml

Exit status 1: the daemon does not answer, or the LUN is not ready.`,
		Args: usageArgs(noArgs),
	}
	f.Add(cmd.Flags())
	own := settings.Pick(newConfig().settings(), keyPort, keyTargetName, keyAccessMode)
	settings.AddFlags(cmd.Flags(), own)
	cmd.RunE = running(func(cmd *cobra.Command, _ []string) error {
		ctx, cancel := context.WithTimeout(cmd.Context(), f.Timeout)
		defer cancel()
		document, err := f.Document(ctx, loadBy(osfile.ReadText, cmd.Flags(), own).Loader)
		if err == nil {
			_, err = fmt.Fprintln(a.stdout, document)
		}
		return err
	})
	return cmd
}
