// Command client does what virt-handler of KubeVirt 1.9 does with a launcher, for tests:
//
//	client sync LAUNCHER VMI PLUGINS    it starts the machine, or keeps it running
//	client target LAUNCHER VMI PLUGINS  this launcher is a migration's target
//	client stop LAUNCHER VMI PLUGINS    the guest is to shut itself down
//
// LAUNCHER is a socket, VMI a file with JSON. PLUGINS is a file with the cluster's objects of kind
// Plugin, a list in JSON; if it is empty, there are none. An error of the launcher goes to standard
// error, and the exit status is 1.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"

	v1 "kubevirt.io/api/core/v1"
	cmdv1 "kubevirt.io/kubevirt/pkg/handler-launcher-com/cmd/v1"
	cmdclient "kubevirt.io/kubevirt/pkg/virt-handler/cmd-client"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 4 {
		return errors.New("usage: client sync|target|stop LAUNCHER VMI PLUGINS")
	}
	text, err := os.ReadFile(args[2])
	if err != nil {
		return err
	}
	var vmi v1.VirtualMachineInstance
	if err := json.Unmarshal(text, &vmi); err != nil {
		return err
	}
	plugins, err := os.ReadFile(args[3])
	if err != nil {
		return err
	}
	client, err := cmdclient.NewClient(args[1])
	if err != nil {
		return err
	}
	defer client.Close()
	options := &cmdv1.VirtualMachineOptions{PluginsJson: plugins}
	switch args[0] {
	case "sync":
		return client.SyncVirtualMachine(&vmi, options)
	case "target":
		return client.SyncMigrationTarget(&vmi, options)
	case "stop":
		return client.ShutdownVirtualMachine(&vmi)
	}
	return fmt.Errorf("unknown command %q", args[0])
}
