package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"kubevirt.io/disk/adapter"
	"kubevirt.io/disk/adapter/machine"
	"kubevirt.io/disk/internal/adapt"
	"kubevirt.io/disk/internal/cli/console"
	"kubevirt.io/disk/internal/cli/settings"
	"kubevirt.io/disk/internal/durable"
	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/problems"
	"kubevirt.io/disk/internal/words"
	"kubevirt.io/disk/libvirt"
	"kubevirt.io/disk/registry"
	"kubevirt.io/disk/registry/transport"
)

// The paths of the kernel and the initramfs in the image kubevirt.io:adapter, and the settings that
// name other files.
const (
	defaultKernel = "/boot/vmlinuz"
	defaultInitrd = "/boot/initrd"
	keyKernel     = "kernel"
	keyInitrd     = "initrd"
	flagTo        = "to"
	flagMemoryMiB = "memory-mib"
	flagCPUs      = "cpus"
)

// The files that adapt makes in addition to the levels.
const (
	adaptedKernel = "kernel"
	adaptedInitrd = "initrd"
	adaptedDisk   = "disk.qcow2"
	adaptedDomain = "domain.xml"
)

type adaptOptions struct {
	to, kernel, initrd string
	size               string
	name               string
	memory, cpus       uint
	emulated           bool
	publish            []string
	published          []libvirt.Publish
	machine            machine.Options
	registry           reach
}

// bootSettings are the settings of the kernel, the initramfs and the command line.
func (o *adaptOptions) bootSettings() []settings.Setting {
	return []settings.Setting{
		{Key: keyKernel, Env: []string{"ADAPT_KERNEL"}, Default: defaultKernel,
			Usage: "`file` of the kernel", To: settings.Text(&o.kernel)},
		{Key: keyInitrd, Env: []string{"ADAPT_INITRD"}, Default: defaultInitrd,
			Usage: "`file` of the initramfs", To: settings.Text(&o.initrd)},
	}
}

func (a *app) adaptCommand() *cobra.Command {
	var o adaptOptions
	cmd := &cobra.Command{
		Use:   "adapt REF --to DIRECTORY [-- ARGUMENT...]",
		Short: "Make a container image a virtual machine: a disk, a kernel and a domain",
		Long: `Makes a disk from a container image, and what is needed to boot it. DIRECTORY gets
these:

  layer-*.qcow2   a level of the disk for each layer of the image; images with the same lower
                  layers share them, and a level that is there is not made again
  layer-*.state   with it, another layer above is applied without reading those below; may be
                  removed
  image-*.qcow2   the level on top, with the image's configuration
  disk.qcow2      what the machine writes; if it is there, the machine goes on with it
  kernel, initrd  what is booted, from the image kubevirt.io:adapter
  domain.xml      a domain of libvirt that runs the image's entry point

  virsh create DIRECTORY/domain.xml --console

The arguments, and the options that a container runtime also has, override the image's.

` + registryHelp,
		Args: beforeDash(usageArgs(cobra.MinimumNArgs(1))),
	}
	o.add(cmd)
	settings.AddFlags(cmd.Flags(), o.registry.settings())
	cmd.ValidArgsFunction = cobra.NoFileCompletions
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ref, err := transport.ParseReference(args[0])
		if err != nil {
			return err
		}
		own := slices.Concat(o.registry.settings(), o.bootSettings())
		all := slices.Concat(own, machineSettings(&o.machine))
		l := loadBy(osfile.ReadText, cmd.Flags(), all)
		l.Land(own)
		l.machine(&o.machine, args[1:])
		size := o.check(&l.Problems)
		if err := l.Problems.Err(); err != nil {
			return err
		}
		work := func(ctx context.Context, client *registry.Client) error {
			return a.adapt(ctx, client, ref, o, size)
		}
		return a.withRegistryOf(cmd, l, o.registry, ref, work)
	}
	return cmd
}

func (o *adaptOptions) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.StringVar(&o.to, flagTo, "", "`directory` for everything; made if it is missing")
	flags.StringVar(&o.size, keySize, "", "smallest size of the disk in `bytes`, as 20Gi: the "+
		"machine uses all of it (default what the image needs)")
	settings.AddSettings(flags, slices.Concat(o.bootSettings(), machineSettings(&o.machine)))
	flags.StringArrayVar(&o.publish, "publish", nil, "`[ADDRESS:]PORT:PORT` of this host that "+
		"leads to one of the machine, with /udp for UDP (default address 127.0.0.1); repeatable")
	flags.StringVar(&o.name, "name", "", "`name` of the domain (default the image's)")
	flags.UintVar(&o.memory, flagMemoryMiB, 256, "memory of the domain, `MiB`")
	flags.UintVar(&o.cpus, flagCPUs, 1, "`number` of CPUs of the domain")
	flags.BoolVar(&o.emulated, "emulated", false, "a domain for a host without KVM")
}

// check refuses wrong settings before anything is made. It returns the size in bytes.
func (o *adaptOptions) check(wrong *problems.List) (size int64) {
	var err error
	if o.to == "" {
		wrong.AddMissing("--"+flagTo, "name the directory for the disk")
	} else if err := o.checkPlace(); err != nil {
		wrong.Add("--"+flagTo, "%v", err)
	}
	if o.size != "" {
		if size, err = parseSize(o.size); err != nil {
			wrong.Add("--"+keySize, "%v", err)
		}
	}
	const none = "\"0\" is not a number: use one from 1"
	if o.memory == 0 {
		wrong.Add("--"+flagMemoryMiB, none)
	}
	if o.cpus == 0 {
		wrong.Add("--"+flagCPUs, none)
	}
	boot := o.bootSettings()
	for i, path := range []string{o.kernel, o.initrd} {
		f, err := osfile.OpenRegular(path)
		switch {
		case err == nil:
			_ = f.Close() // it was opened for reading
		case errors.Is(err, fs.ErrNotExist):
			wrong.Add(named(boot[i]).String(), "%q does not exist: the image "+
				"kubevirt.io:adapter has one, and \"make machine\" makes one", path)
		default:
			wrong.Add(named(boot[i]).String(), "%v", err)
		}
	}
	for _, text := range o.publish {
		p, err := libvirt.ParsePublish(text)
		if err != nil {
			wrong.Add("--publish", "%v", err)
		}
		o.published = append(o.published, p)
	}
	if o.name != "" && wrong.Err() == nil {
		if _, err := o.domain("/", transport.Reference{}, "amd64"); err != nil {
			wrong.Add("--name", "%v", err)
		}
	}
	return size
}

// checkPlace refuses a directory in which other files than those of an earlier call would be
// replaced. The names of levels are unique, but other programs may use the names of the other
// files.
func (o *adaptOptions) checkPlace() error {
	if info, err := os.Stat(o.to); err == nil && !info.IsDir() {
		return fmt.Errorf("%q is not a directory: name another one", o.to)
	}
	entries, _ := os.ReadDir(o.to) // making it reports the error
	if slices.ContainsFunc(entries, func(e fs.DirEntry) bool { return adapter.IsTop(e.Name()) }) {
		return nil
	}
	for name, from := range map[string]string{adaptedKernel: o.kernel, adaptedInitrd: o.initrd,
		adaptedDomain: ""} {
		path := filepath.Join(o.to, name)
		there, err := os.Stat(path)
		if err != nil {
			continue
		}
		if given, err := os.Stat(from); err != nil || !os.SameFile(there, given) {
			return fmt.Errorf("%q is there, and no machine of adapt is beside it: name another "+
				"directory, or move the file away", path)
		}
	}
	return nil
}

func (a *app) adapt(ctx context.Context, client *registry.Client, ref transport.Reference,
	o adaptOptions, size int64) error {
	p := new(registry.Progress)
	report := a.reporter(console.OneLine(ref.String()))
	var made *adapt.Made
	err := report.Watch(p, func() (err error) {
		made, err = adapt.Image(ctx, client, ref, o.to,
			adapt.Options{Size: size, Machine: o.machine, Progress: p, Fits: o.fits})
		return err
	})
	report.Clear()
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("interrupted: complete files in %q are kept and reused", o.to)
	}
	if err != nil {
		return explainWrite(err, o.to)
	}
	dir, err := filepath.Abs(o.to)
	if err != nil {
		return err
	}
	if err := o.complete(dir, ref, made); err != nil {
		return explainWrite(err, o.to)
	}
	fmt.Fprintf(a.stderr, "%s: %s is a disk of %s in %d levels, %d of them existed before; "+
		"start it with\n  virsh create %s --console\n", console.OneLine(ref.String()),
		digestsText(made.Digest, made.Platform), console.ShortSize(made.Size), len(made.Levels),
		made.Cached, words.Shell(filepath.Join(dir, adaptedDomain)))
	return nil
}

// fits refuses the usual kernel, which is for this machine, for an image of another architecture.
func (o *adaptOptions) fits(arch string) error {
	if arch == runtime.GOARCH || o.kernel != defaultKernel && o.initrd != defaultInitrd {
		return nil
	}
	return fmt.Errorf("the image is made for %s, and this program's kernel for %s: name a kernel "+
		"for %s, and its initramfs, with --%s and --%s (\"make machine\" makes both)", arch,
		runtime.GOARCH, arch, keyKernel, keyInitrd)
}

// complete makes the files other than the levels. It checks everything before it replaces the
// first.
func (o *adaptOptions) complete(dir string, ref transport.Reference, made *adapt.Made) error {
	disk := filepath.Join(dir, adaptedDisk)
	if err := made.CheckWritable(disk); err != nil {
		return err
	}
	text, err := o.domain(dir, ref, made.Arch)
	if err != nil {
		return err
	}
	if err := made.WritableDisk(disk); err != nil {
		return err
	}
	for name, from := range map[string]string{adaptedKernel: o.kernel, adaptedInitrd: o.initrd} {
		if err := copySmallFile(from, filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return replaceFile(filepath.Join(dir, adaptedDomain), strings.NewReader(text+"\n"))
}

// domain is the description of the machine.
func (o *adaptOptions) domain(dir string, ref transport.Reference, goArch string) (string, error) {
	disk, err := libvirt.FileDisk(filepath.Join(dir, adaptedDisk), machine.DefaultSerial,
		libvirt.Device{Cache: libvirt.CacheWriteback})
	if err != nil {
		return "", err
	}
	arch := libvirt.ArchAMD64
	if goArch == "arm64" {
		arch = libvirt.ArchARM64
	}
	return libvirt.KernelDomain{Name: cmp.Or(o.name, domainName(ref)), Disk: disk, Memory: o.memory,
		CPUs: o.cpus, Emulated: o.emulated, Port: machine.Port, Publish: o.published,
		Boot: libvirt.KernelBoot{Arch: arch, Kernel: filepath.Join(dir, adaptedKernel),
			Initrd:  filepath.Join(dir, adaptedInitrd),
			Cmdline: machine.KernelArgs(goArch, machine.DefaultSerial)}}.DomainXML()
}

// domainName makes a name from a reference: the last part of its path, without characters that
// libvirt refuses.
func domainName(ref transport.Reference) string {
	name := ref.String()
	name = name[strings.LastIndex(name, "/")+1:]
	name, _, _ = strings.Cut(name, "@")
	name = strings.Map(func(r rune) rune {
		switch {
		case 'a' <= r && r <= 'z', 'A' <= r && r <= 'Z', '0' <= r && r <= '9', r == '.', r == '_':
			return r
		}
		return '-'
	}, name)
	if name = strings.Trim(name, "-."); name == "" {
		return "container"
	}
	return name
}

// copySmallFile copies a file of a few MiB, unless it is the same file.
func copySmallFile(from, to string) error {
	source, err := osfile.OpenRegular(from)
	if err != nil {
		return err
	}
	defer source.Close()
	if a, err := source.Stat(); err == nil {
		if b, err := os.Stat(to); err == nil && os.SameFile(a, b) {
			return nil
		}
	}
	return replaceFile(to, source)
}

// replaceFile replaces a file that everybody may read: libvirt's QEMU runs as another user.
func replaceFile(name string, content io.Reader) error {
	name, err := osfile.ResolvedFile(name)
	if err != nil {
		return err
	}
	return durable.Write(name, 0o644, func(f *os.File) error {
		_, err := io.Copy(f, content)
		return err
	})
}
