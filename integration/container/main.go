// Command container is the entry point of the container images that tests boot as virtual machines.
// Its first argument says what it does.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func main() {
	if len(os.Args) < 2 {
		fail(fmt.Errorf("what to do?"))
	}
	var err error
	switch os.Args[1] {
	case "exit":
		status, convErr := strconv.Atoi(os.Args[2])
		if err = convErr; err == nil {
			os.Exit(status)
		}
	case "about":
		err = about()
	case "web":
		err = web()
	case "deaf":
		err = deaf()
	case "orphans":
		err = orphans()
	case "init":
		err = initSystem()
	case "stress":
		err = stress()
	case "orphan":
		time.Sleep(100 * time.Millisecond)
	default:
		err = fmt.Errorf("%q is nothing to do", os.Args[1])
	}
	if err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "container:", err)
	os.Exit(1)
}

// About is what a process sees of its environment.
type About struct {
	PID, UID, GID int
	Groups        []int
	Args, Env     []string
	Dir, Hostname string
	Terminal      bool
	Mounts        map[string]string // type by place
	Resolv, Hosts string
	OpenFiles     syscall.Rlimit
	DiskBytes     uint64
	Stderr        string // why /dev/stderr cannot be opened, or ""
	Addresses     []string
	MTU           int // of the first card
}

func about() error {
	a := About{PID: os.Getpid(), UID: os.Getuid(), GID: os.Getgid(), Args: os.Args,
		Env: os.Environ(), Mounts: map[string]string{}}
	if len(os.Args) > 3 && os.Args[2] == "lan" {
		if err := a.waitForLAN(os.Args[3]); err != nil {
			return err
		}
	}
	a.Groups, _ = os.Getgroups()
	a.Dir, _ = os.Getwd()
	a.Hostname, _ = os.Hostname()
	info, err := os.Stdin.Stat()
	if err != nil {
		return err
	}
	_, ttyErr := os.OpenFile("/dev/tty", os.O_RDWR, 0)
	a.Terminal = info.Mode()&os.ModeCharDevice != 0 && ttyErr == nil
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(mounts)) {
		fields := strings.Fields(line)
		a.Mounts[fields[1]] = fields[2]
	}
	for file, to := range map[string]*string{"/etc/resolv.conf": &a.Resolv,
		"/etc/hosts": &a.Hosts} {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		*to = string(text)
	}
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &a.OpenFiles); err != nil {
		return err
	}
	var fs syscall.Statfs_t
	if err := syscall.Statfs("/", &fs); err != nil {
		return err
	}
	a.DiskBytes = fs.Blocks * uint64(fs.Bsize)
	if f, err := os.OpenFile("/dev/stderr", os.O_WRONLY, 0); err != nil {
		a.Stderr = err.Error()
	} else {
		f.Close()
	}
	// "about web" is a web server that first reports its environment, with the address from a
	// router's advertisement, which comes after the address from DHCP.
	if len(os.Args) > 2 && os.Args[2] == "web" {
		if a.Addresses, err = addresses(); err != nil {
			return err
		}
		if err := json.NewEncoder(os.Stdout).Encode(a); err != nil {
			return err
		}
		return web()
	}
	return json.NewEncoder(os.Stdout).Encode(a)
}

// longTime is how often to look for settings from the network, ten times a second. They may take
// long on an emulated machine of a busy host.
const longTime = 1200

// waitForLAN waits until all settings from DHCP and an IPv6 router have arrived, and a card has an
// MTU.
func (a *About) waitForLAN(mtu string) (err error) {
	if a.Addresses, err = addresses(); err != nil {
		return err
	}
	for range longTime {
		cards, err := net.Interfaces()
		if err != nil {
			return err
		}
		for _, c := range cards {
			if c.Flags&net.FlagLoopback == 0 {
				a.MTU = c.MTU
			}
		}
		resolv, err := os.ReadFile("/etc/resolv.conf")
		if err != nil {
			return err
		}
		if strings.Count(string(resolv), "nameserver ") > 1 && strconv.Itoa(a.MTU) == mtu {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	return nil
}

// addresses waits for IPv4 and IPv6 addresses.
func addresses() (all []string, err error) {
	for range longTime {
		list, err := net.InterfaceAddrs()
		if err != nil {
			return nil, err
		}
		all = nil
		four, six := false, false
		for _, a := range list {
			if prefix, err := netip.ParsePrefix(a.String()); err == nil {
				at := prefix.Addr()
				all = append(all, at.String())
				four = four || at.Is4() && at.IsGlobalUnicast()
				six = six || at.Is6() && at.IsGlobalUnicast()
			}
		}
		if four && six {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	return all, nil
}

// web saves posted data in a file, on storage, and serves it. SIGQUIT is its stop signal: then it
// says so, and exits with status 42.
func web() error {
	const file = "/srv/data"
	listener, err := net.Listen("tcp", ":80")
	if err != nil {
		return err
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGQUIT)
	go func() {
		<-stop
		fmt.Println("stopped by its stop signal")
		os.Exit(42)
	}()
	fmt.Println("serving")
	return http.Serve(listener, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			f, err := os.OpenFile(file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
			if err == nil {
				if _, err = io.Copy(f, r.Body); err == nil {
					err = f.Sync()
				}
				f.Close()
			}
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
			}
			return
		}
		http.ServeFile(w, r, file)
	}))
}

// deaf ignores its stop signal.
func deaf() error {
	signal.Ignore(syscall.SIGTERM)
	fmt.Println("deaf")
	time.Sleep(time.Hour)
	return nil
}

// initSystem acts as an init system, which has to be process 1. When told to end, it switches off.
// In the machine's own namespace, that would end the machine before its status is reported.
func initSystem() error {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGUSR1)
	if os.Getpid() != 1 {
		return fmt.Errorf("an init system is process %d", os.Getpid())
	}
	// Its keys are lost until the kernel has found the keyboard.
	for range longTime {
		devices, err := os.ReadFile("/proc/bus/input/devices")
		if err != nil {
			return err
		}
		if strings.Contains(string(devices), "keyboard") {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	fmt.Println("the init system is process 1, and has a keyboard")
	<-stop
	fmt.Println("the init system switches off")
	return syscall.Reboot(syscall.LINUX_REBOOT_CMD_POWER_OFF)
}

// orphans leaves processes without a parent, and says how many zombies there are after they have
// ended.
func orphans() error {
	if len(os.Args) == 2 {
		// In between is a process that ends before its child does.
		if err := exec.Command(os.Args[0], "orphans", "parent").Run(); err != nil {
			return err
		}
	} else {
		return exec.Command(os.Args[0], "orphan").Start()
	}
	for zombies := -1; ; time.Sleep(50 * time.Millisecond) {
		var orphan int
		var err error
		if orphan, zombies, err = processes(); err != nil {
			return err
		}
		if orphan == 0 {
			fmt.Printf("zombies: %d\n", zombies)
			return nil
		}
	}
}

// processes counts the orphans that run and the zombies.
func processes() (orphans, zombies int, err error) {
	entries, err := os.ReadDir("/proc")
	for _, e := range entries {
		stat, err := os.ReadFile("/proc/" + e.Name() + "/stat")
		if err != nil {
			continue
		}
		_, rest, _ := strings.Cut(string(stat), ") ")
		cmdline, _ := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		switch {
		case strings.HasPrefix(rest, "Z"):
			zombies++
		case strings.HasSuffix(string(cmdline), "\x00orphan\x00"):
			orphans++
		}
	}
	return orphans, zombies, err
}
