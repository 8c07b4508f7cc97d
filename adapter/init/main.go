package guestinit

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/disk/adapter/machine"
)

// Main is the program: the init, or, when started by the init under another name, the stage. It
// returns the exit status of the stage; the init switches the machine off instead.
func Main(args []string) int {
	if len(args) > 0 && args[0] == stageName {
		return stage()
	}
	if os.Getpid() != 1 {
		fmt.Fprintln(os.Stderr, "kubevirt-disk-init is process 1 of a machine that "+
			"kubevirt-disk adapt has made: it is of no use anywhere else")
		return 2
	}
	g := &guest{report: newReporter(os.Stdout)}
	end := g.runAll()
	g.powerOff(end)
	return 0
}

// guest is a running machine.
type guest struct {
	report *reporter
	params params
	disk   mounted
	grace  time.Duration // from the stop signal to SIGKILL
	// stops are requests of the host to stop
	stops   chan struct{}
	buttons *powerButtons
}

// runAll runs the machine until its entry point has ended, or something has failed. Then the disk
// is clean.
func (g *guest) runAll() (end ending) {
	defer func() {
		// If process 1 dies, the kernel panics, and the reason is lost.
		if p := recover(); p != nil {
			end = g.failed(fmt.Errorf("the init has a bug: %v", p))
		}
	}()
	end, err := g.run()
	if err != nil {
		end = g.failed(err)
	}
	endOthers()
	if g.disk.dir != "" {
		if err := g.disk.release(); err != nil {
			g.report.say("%v", err)
		}
	}
	return end
}

// failed reports why the entry point could not be run.
func (g *guest) failed(err error) ending {
	g.report.say("%v", err)
	g.report.send(portTimeout, machine.WordFailed, err.Error())
	status := machine.StatusMachine
	if start, ok := errors.AsType[*startError](err); ok {
		status = start.status
	}
	return ending{status: status}
}

var initMounts = []mountPoint{
	{kind: "proc", at: "/proc", flags: harmless},
	{kind: "sysfs", at: "/sys", flags: harmless},
	{kind: "devtmpfs", at: "/dev", flags: unix.MS_NOSUID, data: "mode=0755"},
}

func (g *guest) run() (ending, error) {
	for _, m := range initMounts {
		if err := unix.Mount(m.kind, m.at, m.kind, m.flags, m.data); err != nil {
			return ending{}, fmt.Errorf("%s cannot be mounted: %w", m.at, err)
		}
	}
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("-1000"), 0) // else it may be killed
	line, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return ending{}, err
	}
	var warnings []string
	g.params, warnings = parseParams(string(line))
	for _, w := range warnings {
		g.report.say("%s", w)
	}
	g.watchForStops()
	device, err := g.findDisk()
	if err != nil {
		return ending{}, err
	}
	// All drivers are loaded now. The network is set up while the disk is mounted.
	network := newNetwork(networkDir, g.params.hostname, g.report.say)
	go network.start()
	// Before the mount, because the configuration shows whether it is the right disk, and mounting
	// may change the disk.
	p, options, err := g.readProcess(device)
	if err != nil {
		return ending{}, err
	}
	disk, growth, err := mountDisk(device, diskDir)
	if err != nil {
		return ending{}, err
	}
	g.disk = disk
	if growth != nil {
		g.report.say("%v", growth)
	}
	p.ReadOnly = disk.readOnly
	p.recogniseInit(diskDir)
	g.grace = graceOf(options, g.params)
	if g.params.hostname == "" {
		network.rename(options.Hostname)
	}
	g.waitFor(network)
	g.buttons.look()
	return g.runEntryPoint(p)
}

func (g *guest) readProcess(device string) (process, machine.Options, error) {
	f, err := os.Open(device)
	if err != nil {
		return process{}, machine.Options{}, err
	}
	defer f.Close()
	return readProcess(f, g.params)
}

// findDisk loads the modules, and waits for the disk. The drivers of the power button are among the
// modules. Its events are read from then on, so a press while the entry point starts is not lost.
func (g *guest) findDisk() (string, error) {
	if err := loadModules("/lib/modules", insertModule); err != nil {
		g.report.say("%v", err)
	}
	return waitForDisk(g.params.serial, g.buttons.look)
}

// waitFor waits until the machine can be reached, which programs expect at their start.
func (g *guest) waitFor(n *network) {
	select {
	case <-n.online:
	case <-time.After(g.params.network):
		g.report.say("there is no network after %v: the entry point is started without one",
			g.params.network)
	case <-g.stops:
		g.stops <- struct{}{} // the entry point gets it at once
	}
}

// watchForStops watches every way in which a host can ask the machine to stop.
func (g *guest) watchForStops() {
	g.stops = make(chan struct{}, 2)
	stop := func() {
		select {
		case g.stops <- struct{}{}:
		default: // two requests are waiting already
		}
	}
	g.buttons = newPowerButtons(stop)
	go g.report.listen(stop)
	// Ctrl-Alt-Del sends SIGINT to the init instead of restarting the machine at once.
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_CAD_OFF)
	interrupts := make(chan os.Signal, 1)
	signal.Notify(interrupts, unix.SIGINT)
	go func() {
		for range interrupts {
			stop()
		}
	}()
}

// forwarded are the signals to process 1 that are meant for the entry point.
var forwarded = []os.Signal{unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2}

// runEntryPoint starts the entry point, and returns when it has ended and all its output is
// written.
func (g *guest) runEntryPoint(p process) (ending, error) {
	streams, err := newStreams(p.TTY)
	if err != nil {
		return ending{}, err
	}
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, forwarded...)
	name, err := os.Hostname()
	if err == nil {
		p.Env = mergeEnv([]string{"HOSTNAME=" + name}, p.Env)
	}
	pid, err := p.start(streams.in, streams.out)
	streams.started()
	if err != nil {
		return ending{}, err
	}
	go g.report.send(portTimeout, machine.WordRunning)
	exited := make(chan unix.WaitStatus, 1)
	go func() { exited <- reap(pid) }()
	s := &supervisor{pid: pid, stop: p.StopSignal, grace: g.grace, say: g.report.say,
		requests: g.stops, signals: signals,
		// ESRCH: it has just ended.
		kill: func(pid int, s syscall.Signal) { _ = unix.Kill(pid, s) }}
	end := s.run(exited, p.Init)
	endOthers()
	streams.finish()
	return end, nil
}

// powerOff reports how the entry point has ended, and switches the machine off or restarts it.
func (g *guest) powerOff(end ending) {
	command := unix.LINUX_REBOOT_CMD_POWER_OFF
	if end.restart {
		g.report.say("the image has asked for a restart")
		command = unix.LINUX_REBOOT_CMD_RESTART
	} else {
		g.report.say("the entry point has ended with status %d", end.status)
		g.report.send(portTimeout, machine.WordExited, fmt.Sprint(end.status))
	}
	unix.Sync()
	if err := unix.Reboot(command); err != nil {
		g.report.say("the machine cannot be switched off: %v", err)
	}
	select {} // process 1 never ends
}
