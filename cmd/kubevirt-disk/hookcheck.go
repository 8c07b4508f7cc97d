package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/plainyaml"
	"kubevirt.io/disk/kubevirt"
)

// maxManifest bounds a file of manifests. etcd keeps no larger object.
const maxManifest = 4 << 20

func (a *app) hookCommand() *cobra.Command {
	var check []string
	cmd := &cobra.Command{
		Use:   "hook --check FILE",
		Short: "Say what a virtual machine of KubeVirt would get from its hook sidecars",
		Long: `Reads manifests, and says what each machine in them (a VirtualMachine, or a
VirtualMachineInstance) gets from its hook sidecars of kubevirt-disk: from which image, where the
disks are kept, how the guest sees them, and whether it can migrate; or what is wrong. It asks no
cluster and no registry, so it does not know which disks an image has. Other objects are ignored.

"-" is standard input. Exit status 1: something is wrong.`,
		Args: usageArgs(noArgs),
	}
	cmd.Flags().StringArrayVar(&check, "check", nil, "`file` of manifests, or -. Repeatable.")
	cmd.RunE = func(*cobra.Command, []string) error {
		if len(check) == 0 {
			return errors.New("name a manifest: kubevirt-disk hook --check vm.yaml")
		}
		var wrong error
		for _, file := range check {
			if err := a.checkManifests(file); err != nil {
				wrong = errors.Join(wrong, err)
			}
		}
		if wrong != nil {
			return &failure{err: wrong}
		}
		return nil
	}
	return cmd
}

func (a *app) checkManifests(file string) error {
	in := a.stdin
	if file != standardStream {
		f, err := osfile.OpenText(file)
		if err != nil {
			return err
		}
		defer f.Close()
		in = f
	}
	text, err := io.ReadAll(io.LimitReader(in, maxManifest+1))
	if err == nil && len(text) > maxManifest {
		err = fmt.Errorf("more than %d bytes", maxManifest)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	var wrong error
	machines, lines := 0, -1 // the line before the first document is not in the file
	for document := range strings.SplitSeq("\n"+string(text), "\n---") {
		next := lines + strings.Count(document, "\n") + 1
		if lines < 0 {
			document, lines = strings.TrimPrefix(document, "\n"), 0
		}
		is, err := a.checkManifest(document, lines)
		lines = next
		if is {
			machines++
		}
		if err != nil {
			wrong = errors.Join(wrong, fmt.Errorf("%s: %w", file, err))
		}
	}
	if machines == 0 && wrong == nil {
		return fmt.Errorf("%s: there is no machine of KubeVirt in it", file)
	}
	return wrong
}

// machineKinds are the kinds of KubeVirt that are machines, or make machines by spec.template.
var machineKinds = []string{"VirtualMachine", "VirtualMachineInstance",
	"VirtualMachineInstanceReplicaSet"}

// exampleDigest is the digest in examples and docs. No image has it.
const exampleDigest = "@sha256:a8dd75ecffd4cdd96072d60c2237b448e0c8b2bc94d57f10fdbc8c481d9005b8"

// checkSet checks a VMIdentitySet for errors that otherwise only show as a machine that waits for
// ever.
func checkSet(object map[string]any) error {
	spec, _ := object["spec"].(map[string]any)
	if image, _ := spec["image"].(string); strings.HasSuffix(image, exampleDigest) {
		return errors.New("spec.image still has the digest of the example: write the one that " +
			"push has printed")
	}
	return nil
}

// readManifest reads one document. lines is the number of lines before it in its file.
func readManifest(document string, lines int) (object map[string]any, err error) {
	root, err := plainyaml.Parse([]byte(document), plainyaml.MaxValues)
	switch {
	case err == nil && root == nil:
		return nil, nil
	case err == nil && root.Kind != yaml.MappingNode:
		return nil, fmt.Errorf("line %d: this is no manifest: it begins with no key, such as "+
			"apiVersion", lines+root.Line)
	case err == nil:
		err = plainyaml.Decode([]byte(document), plainyaml.MaxValues, &object)
	}
	if err != nil && lines > 0 { // so that the error has the number of the line in the file
		return readManifest(strings.Repeat("\n", lines)+document, 0)
	}
	return object, err
}

// checkManifest checks one document. lines is the number of lines before it in its file. is: the
// document is a machine.
func (a *app) checkManifest(document string, lines int) (is bool, err error) {
	object, err := readManifest(document, lines)
	if err != nil {
		return false, err
	}
	kind, _ := object["kind"].(string)
	version, _ := object["apiVersion"].(string)
	metadata, _ := object["metadata"].(map[string]any)
	name := console.OneLine(fmt.Sprintf("%s %v", kind, metadata["name"]))
	if kind == "VMIdentitySet" && strings.HasPrefix(version, "disk.kubevirt.io/") {
		if err := checkSet(object); err != nil {
			return false, fmt.Errorf("%s: %w", name, err)
		}
	}
	if !slices.Contains(machineKinds, kind) || !strings.HasPrefix(version, "kubevirt.io/") {
		return false, nil
	}
	text, err := json.Marshal(object)
	if err != nil {
		return true, fmt.Errorf("%s: %w", name, err)
	}
	promises, err := kubevirt.Check(text, a.checkServeArgs)
	switch {
	case err != nil:
		err = fmt.Errorf("%s: %w", name, err)
	case len(promises) == 0:
		fmt.Fprintf(a.stdout, "%s has no hook sidecar, so it gets nothing from kubevirt-disk\n",
			name)
	default:
		fmt.Fprintln(a.stdout, name)
		for _, p := range promises {
			a.showPromise(&p)
		}
	}
	return true, err
}

// checkServeArgs checks the arguments of a hook sidecar, which are those of serve. It ignores
// values that only the container can check, such as files.
func (a *app) checkServeArgs(args []string) error {
	if args[0] != "serve" {
		return fmt.Errorf("the first one is %q: a hook sidecar runs \"serve\"", args[0])
	}
	return a.serveCommand().ParseFlags(args[1:])
}

// showPromise prints how the disks of a hook sidecar will be served.
func (a *app) showPromise(p *kubevirt.Promise) {
	say := func(what, format string, args ...any) {
		fmt.Fprintf(a.stdout, "    %-15s %s\n", what, console.OneLine(fmt.Sprintf(format, args...)))
	}
	fmt.Fprintf(a.stdout, "  %s\n", p.Container)
	if p.Other {
		say("other", "%s runs a program of its own", p.Image)
		return
	}
	flags := a.serveCommand().Flags()
	_ = flags.Parse(p.Args[min(1, len(p.Args)):])
	images, elsewhere := valuesOf(flags, flagImage), valuesOf(flags, keyDisk)
	switch {
	case p.Set != "":
		say("disk", "that of the VMIdentitySet %s, served by %s", p.Set, p.Image)
	case len(elsewhere) > 0:
		say("disk", "%s, handed on by %s", strings.Join(elsewhere, ", "), p.Image)
	case len(images) > 0:
		say("disks", "those of %s, fetched by %s", strings.Join(images, ", "), p.Image)
	default:
		say("disks", "the files in /disk of %s", p.Image)
	}
	switch {
	case p.Set != "":
		say("kept", "on a claim that the controller makes")
	case len(elsewhere) > 0:
		say("kept", "by the other server")
	case p.Claim != "":
		say("kept", "on the claim %s, at %s", p.Claim, p.ClaimPath)
	default:
		say("kept", "no: what the guest writes is gone when the machine stops")
	}
	for _, guest := range p.Guest {
		say("in the guest", "%s", guest)
	}
	switch {
	case p.Set != "":
		say("live migration", "if the set has attachment: Service")
	case len(elsewhere) > 0:
		say("live migration", "yes")
	case p.Drained:
		say("live migration", "refused: the disk is in the pod. A drain stops the machine")
	default:
		say("live migration", "refused: the disk is in the pod. With evictionStrategy: None, a "+
			"drain stops the machine instead")
	}
}

// valuesOf are the values of a flag that can be given several times.
func valuesOf(flags *pflag.FlagSet, name string) []string {
	f := flags.Lookup(name)
	if list, ok := f.Value.(pflag.SliceValue); ok {
		return list.GetSlice()
	}
	if f.Value.String() == "" {
		return nil
	}
	return []string{f.Value.String()}
}
