package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/registry"
)

// base is the base image of this release, set by the linker: -X main.base=registry.example.com/kubevirt.io:disk.
var base = ""

func (a *app) pushCommand() *cobra.Command {
	var from string
	cmd := &cobra.Command{
		Use:   "push FILE... REF",
		Short: "Store disk images as a container image in a registry",
		Long: `Stores disk images as a container image that serves them, as "FROM kubevirt.io:disk" and "ADD FILE /disk/" make it: one layer
for each file, with its backing files. Every file is validated as serve would before anything is sent. What the registry has is
not sent again. The same files on the same base have the same digest, which is printed at the end.

` + registryHelp,
		Args: imageArgs(cobra.MinimumNArgs(2)),
	}
	cmd.Flags().StringVar(&from, "base", base, "`reference` of the base image, or none: a containerDisk of KubeVirt, which has one disk and serves nothing")
	addRegistryFlags(cmd.Flags())
	cmd.ValidArgsFunction = completeImages
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		files, last := args[:len(args)-1], args[len(args)-1]
		ref, err := registry.ParseReference(last)
		if err != nil {
			return err
		}
		if from == "" {
			return fmt.Errorf("name the base image by --base, such as --base=REGISTRY/kubevirt.io:disk, or say --base=%s", registry.BaseNone)
		}
		client, err := a.registryClient(cmd, ref)
		if err != nil {
			return err
		}
		defer client.Close()
		return running(func(cmd *cobra.Command, _ []string) error {
			ctx, stop := a.interruptible(cmd.Context(), nil)
			defer stop()
			return a.push(ctx, client, files, ref, from)
		})(cmd, args)
	}
	return cmd
}

func (a *app) push(ctx context.Context, client *registry.Client, files []string, ref registry.Reference, from string) error {
	for _, file := range files {
		if err := checkSource(file); err != nil {
			return err
		}
	}
	if from == registry.BaseNone && len(files) > 1 {
		fmt.Fprintln(a.stderr, "KubeVirt's containerDisks have one disk each: of several, its VMs use none without a path")
	}
	p := new(registry.Progress)
	digest := ""
	report := newReporter(a.stderr, isTerminal(a.stderr), oneLine(ref.String()))
	err := report.while(p, func() (err error) {
		digest, err = client.Push(ctx, files, ref, registry.PushOptions{Base: from, Progress: p})
		return err
	})
	switch {
	case err != nil && ctx.Err() != nil:
		return errors.New("interrupted: the tag was not set; the same push goes on where this one ended")
	case err != nil:
		return err
	}
	_, err = fmt.Fprintln(a.stdout, digest)
	return err
}
