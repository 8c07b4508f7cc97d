// Command client calls hook sidecars and launchers with KubeVirt's own clients, for tests:
//
//	client info HOOK                       the hook's points and versions
//	client define HOOK VERSION DOMAIN VMI  OnDefineDomain of a version of the hooks
//	client shutdown HOOK                   Shutdown
//	client target LAUNCHER VMI             virt-handler: this launcher is a migration's target
//	client migrate LAUNCHER VMI BANDWIDTH  virt-handler: the guest is to move; 0 is no limit
//	client cancel LAUNCHER VMI             virt-handler: it is not to move any more
//	client sync LAUNCHER VMI               virt-handler: what it asks for again and again
//	client stop LAUNCHER VMI               virt-handler: the guest is to shut itself down
//
// HOOK and LAUNCHER are sockets, DOMAIN and VMI files with XML and JSON. It prints the answer. An
// error of the other side goes to standard error, and the exit status is 1.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/api/resource"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/kubevirt/pkg/hooks/info"
	"kubevirt.io/kubevirt/pkg/hooks/v1alpha1"
	"kubevirt.io/kubevirt/pkg/hooks/v1alpha2"
	"kubevirt.io/kubevirt/pkg/hooks/v1alpha3"
	grpcutil "kubevirt.io/kubevirt/pkg/util/net/grpc"
	cmdclient "kubevirt.io/kubevirt/pkg/virt-handler/cmd-client"
)

// timeout is KubeVirt's with a hook's callback.
const timeout = time.Minute

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) < 2 {
		return errors.New("usage: client info|define|shutdown|target|migrate|cancel|sync|stop " +
			"SOCKET [ARGUMENT...]")
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	command, socket, rest := args[0], args[1], args[2:]
	if slices.Contains([]string{"target", "cancel", "sync", "stop"}, command) && len(rest) == 1 ||
		command == "migrate" && len(rest) == 2 {
		return handle(command, socket, rest)
	}
	conn, err := grpcutil.DialSocketWithTimeout(socket, 1)
	if err != nil {
		return err
	}
	defer conn.Close()
	switch {
	case command == "info" && len(rest) == 0:
		answer, err := info.NewInfoClient(conn).Info(ctx, &info.InfoParams{})
		if err != nil {
			return err
		}
		return json.NewEncoder(os.Stdout).Encode(answer)
	case command == "define" && len(rest) == 3:
		return define(ctx, conn, rest[0], rest[1], rest[2])
	case command == "shutdown" && len(rest) == 0:
		_, err := v1alpha3.NewCallbacksClient(conn).Shutdown(ctx, &v1alpha3.ShutdownParams{})
		return err
	}
	return fmt.Errorf("unknown command %q", args)
}

// answer is what OnDefineDomain of every version gives.
type answer interface{ GetDomainXML() []byte }

func define(ctx context.Context, conn *grpc.ClientConn, version, domain, vmi string) error {
	xml, err := os.ReadFile(domain)
	if err != nil {
		return err
	}
	object, err := os.ReadFile(vmi)
	if err != nil {
		return err
	}
	var a answer
	switch version {
	case v1alpha1.Version:
		a, err = v1alpha1.NewCallbacksClient(conn).OnDefineDomain(ctx,
			&v1alpha1.OnDefineDomainParams{DomainXML: xml, Vmi: object})
	case v1alpha2.Version:
		a, err = v1alpha2.NewCallbacksClient(conn).OnDefineDomain(ctx,
			&v1alpha2.OnDefineDomainParams{DomainXML: xml, Vmi: object})
	case v1alpha3.Version:
		a, err = v1alpha3.NewCallbacksClient(conn).OnDefineDomain(ctx,
			&v1alpha3.OnDefineDomainParams{DomainXML: xml, Vmi: object})
	default:
		return fmt.Errorf("KubeVirt has no hooks of version %q", version)
	}
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(a.GetDomainXML())
	return err
}

// handle does what virt-handler does.
func handle(command, socket string, args []string) error {
	text, err := os.ReadFile(args[0])
	if err != nil {
		return err
	}
	var vmi v1.VirtualMachineInstance
	if err := json.Unmarshal(text, &vmi); err != nil {
		return err
	}
	client, err := cmdclient.NewClient(socket)
	if err != nil {
		return err
	}
	defer client.Close()
	switch command {
	case "sync":
		return client.SyncVirtualMachine(&vmi, nil)
	case "migrate": // with the limits that KubeVirt has if nobody sets any
		bandwidth, err := resource.ParseQuantity(args[1])
		if err != nil {
			return err
		}
		return client.MigrateVirtualMachine(&vmi, &cmdclient.MigrationOptions{
			Bandwidth: bandwidth, ProgressTimeout: 150, CompletionTimeoutPerGiB: 150})
	case "cancel":
		return client.CancelVirtualMachineMigration(&vmi)
	case "stop":
		return client.ShutdownVirtualMachine(&vmi)
	}
	return client.SyncMigrationTarget(&vmi, nil)
}
