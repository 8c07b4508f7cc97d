// Package docs has the tests of source and documents: import rules, lengths of files, names in
// documents.
package docs

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"sort"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
	"kubevirt.io/disk/internal/testtool"
)

const module = "kubevirt.io/disk"

// goPackage is the output of `go list -json` about a package; paths of this module are relative to
// it.
type goPackage struct {
	ImportPath string
	Dir        string
	GoFiles    []string
	Imports    []string
	Deps       []string
}

// fileLeaves are what a package may import if it keeps files.
var fileLeaves = []string{"internal/durable", "internal/flock", "internal/osfile"}

// importRule is one rule of the layout: what a package may not import, and why.
type importRule struct {
	pkg    string   // the package it binds; "x/..." binds x and all below it, "..." everything
	except []string // packages covered by pkg that the rule does not bind
	only   []string // if not nil: all it may import of this module
	files  bool     // it keeps files, so it may import those leaves, too
	never  []string // forbidden imports, "x/..." as above
	// if not nil: all it may import besides this module and the standard library
	foreign []string
	deep    bool // indirect imports count, too
	// the package does not exist yet; any other rule that binds no package is a mistake
	planned bool
	why     string
}

var importRules = []importRule{
	{pkg: "target/internal/pdu", only: []string{}, deep: true,
		why: "the wire format knows nothing above it"},
	{pkg: "internal/inflate", only: []string{}, foreign: []string{}, deep: true,
		why: "a decoder is bytes in and bytes out"},
	{pkg: "disk/qcow2", only: []string{"internal/inflate"}, deep: true,
		why: "the reader of untrusted images stands alone and opens no path by itself"},
	{pkg: "disk/foreign", only: []string{}, foreign: []string{}, deep: true,
		why: "the reader of untrusted images stands alone and opens no path by itself"},
	{pkg: "chap", only: []string{}, deep: true,
		why: "credentials and their check depend on no protocol layer"},
	{pkg: "libvirt", only: []string{}, foreign: []string{"libvirt.org/go/libvirtxml"}, deep: true,
		why: "a handler imports it without the server, and gets no other library with it"},
	{pkg: "kubevirt", only: []string{"kubevirt/hookpb", "libvirt"}, deep: true,
		why: "KubeVirt is answered without the server of the disks"},
	{pkg: "kubevirt/hookpb", only: []string{},
		foreign: []string{"google.golang.org/protobuf/..."}, deep: true,
		why: "messages know nobody who sends them"},
	{pkg: "...", except: []string{"kubevirt/...", "internal/daemon", "cmd/kubevirt-disk",
		"integration/..."}, never: []string{"connectrpc.com/...", "kubevirt/..."},
		deep: true, why: "only a daemon speaks to KubeVirt's launcher"},
	{pkg: "...", except: []string{"kubevirt"}, never: []string{"connectrpc.com/...",
		"google.golang.org/grpc/..."}, why: "gRPC is KubeVirt's"},
	{pkg: "cmd/kubevirt-disk", never: []string{"google.golang.org/grpc/..."}, deep: true,
		why: "two servers of gRPC do not fit into the binary"},
	{pkg: "...", never: []string{"k8s.io/...", "sigs.k8s.io/...", "kubernetes/..."}, deep: true,
		why: "whoever serves a disk, or works on that, needs nothing of Kubernetes"},
	{pkg: "target/internal/login", only: []string{"chap"}, deep: true,
		why: "negotiation is text in and text out"},
	{pkg: "internal/rangelock", only: []string{}, foreign: []string{}, deep: true,
		why: "a lock does not know its users"},
	{pkg: "internal/bitset", only: []string{}, foreign: []string{}, deep: true,
		why: "a set of numbers does not know what they number"},
	{pkg: "internal/tlsfiles", only: []string{"internal/osfile"},
		foreign: []string{"go.uber.org/zap/..."},
		why:     "files of a server do not know what it serves"},
	{pkg: "internal/memory", only: []string{}, foreign: []string{}, deep: true,
		why: "memory does not know what it is for"},
	{pkg: "internal/socket", only: []string{"internal/flock", "internal/memory"},
		foreign: []string{"golang.org/x/sys/..."},
		deep:    true, why: "a connection does not know its protocol"},
	{pkg: "internal/flock", only: []string{}, foreign: []string{"golang.org/x/sys/..."},
		deep: true, why: "a lock does not know its users"},
	{pkg: "serving", only: []string{"disk", "internal/flock", "internal/memory",
		"internal/rangelock", "internal/socket", "status"},
		deep: true,
		why:  "a disk in use knows no protocol, no image and no monitoring"},
	{pkg: "status", only: []string{}, foreign: []string{}, deep: true,
		why: "whoever asks a daemon gets nothing else with the types of its answers"},
	{pkg: "target/internal/scsi", only: []string{"disk", "internal/rangelock", "serving",
		"status"},
		why: "the device server sees disks, never a PDU or a connection"},
	{pkg: "disk", only: []string{}, foreign: []string{}, deep: true,
		why: "whoever imports the interfaces gets nothing else with them"},
	{pkg: "disk/image", files: true,
		only: []string{"disk", "disk/foreign", "disk/qcow2",
			"disk/internal/...", "internal/words", "internal/inflate"},
		deep: true, why: "an image does not know the overlay above it"},
	{pkg: "disk/unpack", files: true,
		only: []string{"disk", "disk/foreign", "disk/image", "disk/qcow2", "disk/internal/...",
			"internal/words",
			"internal/inflate"},
		deep: true, why: "what wraps a disk is taken off wherever it comes from"},
	{pkg: "disk/internal/rawfile", only: []string{"disk", "internal/osfile"}, deep: true,
		why: "a raw file does not know its users"},
	{pkg: "internal/osfile", only: []string{}, foreign: []string{"golang.org/x/sys/..."},
		deep: true, why: "careful system calls do not know who makes them"},
	{pkg: "internal/durable", only: []string{"internal/osfile", "internal/flock"}, deep: true,
		why: "whoever keeps a small file uses it, so it knows nothing of disks"},
	{pkg: "disk/overlay", files: true,
		only: []string{"disk", "disk/internal/...", "internal/rangelock"}, deep: true,
		why: "an overlay needs no image format and does not know who opens it"},
	{pkg: "disk/transfer", files: true,
		only: []string{"disk", "disk/internal/..."},
		deep: true,
		why:  "files are moved as they are, whatever is in them"},
	{pkg: "disk/instance", files: true,
		only: []string{"disk", "disk/foreign", "disk/image", "disk/overlay", "disk/qcow2",
			"disk/internal/...", "internal/words", "internal/inflate",
			"internal/rangelock"}, deep: true, why: "storage knows nothing of how it is served"},
	{pkg: "target", only: []string{"chap", "disk", "internal/memory", "internal/socket", "serving",
		"status", "target/internal/login", "target/internal/pdu", "target/internal/scsi"},
		why: "the server serves any Disk; image formats and monitoring are other packages' work"},
	{pkg: "nbd", only: []string{"disk", "internal/flock", "internal/loopback",
		"internal/memory", "internal/osfile", "internal/rangelock",
		"internal/socket", "internal/tlsfiles", "serving", "status"}, deep: true,
		why: "a protocol sees disks in use, and no other protocol"},
	{pkg: "vhostuser", only: []string{"disk", "internal/bitset", "internal/flock",
		"internal/memory", "internal/rangelock", "internal/socket", "serving", "status"},
		deep: true, why: "a protocol sees disks in use, and no other protocol"},
	{pkg: "target/...", never: []string{"nbd", "disk/image", "disk/overlay", "disk/instance",
		"disk/qcow2/..."}, deep: true,
		why: "the server serves any disk and needs no image format"},
	{pkg: "registry/cache", files: true,
		only: []string{}, deep: true,
		why: "the cache keeps bytes with a digest, wherever they come from"},
	{pkg: "registry/internal/bounded", only: []string{}, foreign: []string{}, deep: true,
		why: "untrusted text is bounded before anybody knows what it is"},
	{pkg: "registry/transport", files: true,
		only: []string{"internal/loopback", "registry/internal/bounded", "registry/keychain"},
		deep: true, why: "blobs and manifests come and go, whatever is in them"},
	{pkg: "registry/keychain", files: true, only: []string{"registry/internal/bounded"},
		deep: true, why: "credentials are found without a registry"},
	{pkg: "registry/layer", files: true,
		only: []string{"disk", "disk/foreign", "disk/image", "disk/qcow2", "disk/unpack",
			"disk/internal/...", "internal/words",
			"internal/bitset", "internal/inflate", "internal/loopback",
			"registry/internal/bounded", "registry/keychain", "registry/transport"}, deep: true,
		why: "layers are what they are, whoever pushes, pulls or serves them"},
	{pkg: "registry", files: true,
		only: []string{"disk", "disk/foreign", "disk/image", "disk/qcow2", "disk/unpack",
			"disk/internal/...", "internal/words",
			"internal/bitset", "internal/inflate", "internal/loopback", "internal/plainyaml",
			"registry/cache",
			"registry/internal/bounded", "registry/keychain", "registry/layer",
			"registry/signature", "registry/transport"}, deep: true,
		why: "images come and go without a server"},
	{pkg: "internal/plainyaml", only: []string{}, foreign: []string{"go.yaml.in/yaml/v3"},
		deep: true, why: "untrusted text is bounded before anybody knows what it is"},
	{pkg: "registry/signature", files: true,
		only: []string{"internal/loopback", "internal/plainyaml", "registry/internal/bounded",
			"registry/keychain", "registry/transport"},
		deep: true,
		why:  "whose image it is does not depend on what is in it"},
	{pkg: "registry/registrytest", only: []string{"internal/testtool"},
		why: "tests of every package below registry can call it"},
	{pkg: "adapter/ext4", only: []string{}, foreign: []string{}, deep: true,
		why: "a file system is blocks, and knows neither images nor layers"},
	{pkg: "volume/api", only: []string{}, foreign: []string{}, deep: true,
		why: "clients and controllers get nothing else with the words of the interface"},
	{pkg: "volume/client", only: []string{"volume/api"}, foreign: []string{}, deep: true,
		why: "a controller asks for volumes without the server"},
	{pkg: "volume/store", files: true,
		only: []string{"volume/api"}, deep: true,
		why: "records of volumes know no disks"},
	{pkg: "volume", files: true,
		only: []string{"volume/api", "volume/store"}, deep: true,
		why: "the life of a volume knows disks by an interface"},
	{pkg: "volume/upload", files: true,
		only: []string{"disk", "disk/image", "disk/unpack", "status", "volume/api"},
		why:  "what comes is written to files, whatever a volume is"},
	{pkg: "volume/upload", never: []string{"disk/instance", "disk/overlay", "registry/..."},
		deep: true, why: "receiving data serves no disk"},
	{pkg: "volume/server", files: true,
		only: []string{"disk", "internal/loopback", "internal/plainyaml", "internal/tlsfiles",
			"volume", "volume/api",
			"volume/store"},
		deep: true, why: "the interface over HTTP knows volumes, and no disks"},
	{pkg: "adapter", files: true,
		only: []string{"adapter/ext4", "disk/qcow2", "internal/bitset", "internal/inflate"},
		deep: true, why: "a disk is made of archives, wherever they come from"},
	{pkg: "metrics", only: []string{"serving", "disk", "status"},
		why: "Prometheus series describe disks in use, whatever the protocol; pages are separate"},
	{pkg: "pages", only: []string{"disk", "internal/words", "libvirt", "status"}, deep: true,
		why: "pages show what they are told, whoever serves the disks"},
	{pkg: "pages", never: []string{"github.com/prometheus/...", "github.com/spf13/..."},
		deep: true, why: "metrics and settings are other packages' work"},
	{pkg: "adapter/init/...", only: []string{"adapter/machine", "adapter/init/..."},
		never: []string{"net/http", "crypto/tls"}, deep: true,
		why: "the guest's init is loaded at each boot: what it needs not, it does not have"},
	{pkg: "adapter/init/...", foreign: []string{"golang.org/x/sys/...",
		"github.com/insomniacslk/dhcp/...", "github.com/vishvananda/netlink/..."},
		why: "the guest's init is loaded at each boot: a library makes it larger"},
	{pkg: "adapter/machine", only: []string{}, foreign: []string{"golang.org/x/sys/..."},
		deep: true,
		why:  "host and guest share words, and nothing else"},
	{pkg: "adapter/initrd", only: []string{}, foreign: []string{}, deep: true,
		why: "what boots is made by a builder of images, without the product"},
	{pkg: "cmd/kubevirt-disk", never: []string{"adapter/init/...", "adapter/initrd"}, deep: true,
		why: "the product's binary carries no kernel and no init"},
	{pkg: "internal/daemon/options", only: []string{"adapter/machine", "chap", "disk", "disk/image",
		"disk/instance", "registry/signature", "registry/transport", "serving", "status", "target",
		"volume/server"},
		why: "options are read by every part of a daemon, and start nothing"},
	{pkg: "internal/daemon/plan", files: true, only: []string{"disk", "disk/image", "disk/instance",
		"internal/daemon/options", "internal/problems", "serving"},
		why: "a plan starts nothing, and knows no registry, port or target"},
	{pkg: "internal/daemon/sources", only: []string{"disk/image", "disk/instance",
		"internal/adapt", "internal/daemon/options", "internal/daemon/plan", "internal/problems",
		"metrics", "nbd", "registry", "registry/cache", "registry/signature", "registry/transport",
		"serving", "status"},
		why: "images are found before anything is served; nbd is the client of other servers"},
	{pkg: "internal/committed", files: true, only: []string{"disk", "disk/image", "disk/instance",
		"internal/control", "nbd", "registry", "registry/cache", "registry/transport", "status"},
		why: "a disk becomes an image whatever the command line says"},
	{pkg: "internal/daemon/served", files: true,
		only: []string{"disk", "disk/image", "disk/instance", "internal/adapt", "internal/control",
			"internal/daemon/options", "internal/daemon/plan", "metrics", "registry", "serving",
			"status"},
		why: "disks are opened and closed whatever protocol serves them"},
	{pkg: "internal/daemon/volumes", only: []string{"disk", "disk/image", "disk/instance",
		"internal/daemon/options", "internal/daemon/plan", "internal/daemon/served",
		"internal/daemon/sources", "metrics", "registry", "registry/transport", "serving",
		"status", "volume", "volume/api", "volume/server", "volume/store", "volume/upload"},
		why: "volumes get the disks that are served, not the daemon"},
	{pkg: "internal/daemon", only: []string{"chap", "internal/control", "internal/daemon/options",
		"internal/daemon/plan", "internal/daemon/served", "internal/daemon/sources",
		"internal/daemon/volumes", "internal/durable", "internal/readyfile", "internal/socket",
		"kubevirt",
		"libvirt", "metrics", "nbd", "pages", "serving", "status", "target", "vhostuser"},
		never: []string{"os/signal", "flag"},
		why:   "a daemon is made of options: flags and signals are its command's"},
	{pkg: "...", except: []string{"cmd/...", "internal/daemon/..."},
		never: []string{"internal/daemon/..."}, deep: true,
		why: "a daemon is started by a command"},
	{pkg: "internal/control", files: true,
		only: []string{"chap", "disk", "internal/memory", "internal/rangelock", "internal/socket",
			"serving", "status"},
		never: []string{"github.com/spf13/..."}, deep: true,
		why: "a client of the socket gets no server, no disk format and no command line with it"},
	{pkg: "internal/readyfile", files: true,
		only: []string{}, deep: true,
		why: "serve and provide have the same ready file"},
	{pkg: "disk/provide", files: true,
		only: []string{"disk", "disk/foreign", "disk/image", "disk/qcow2", "disk/internal/...",
			"internal/words",
			"internal/inflate"},
		deep: true, why: "a file of an image needs no server"},
	{pkg: "internal/problems", only: []string{}, foreign: []string{}, deep: true,
		why: "every part that checks a configuration uses it"},
	{pkg: "target/...", never: []string{"metrics", "pages", "registry/...", "cmd/...",
		"github.com/spf13/...", "github.com/prometheus/..."}, deep: true,
		why: "the server can be embedded without command line, registry or monitoring"},
	{pkg: "disk/...", never: []string{"metrics", "pages", "registry/...", "cmd/...", "target/...",
		"github.com/spf13/...", "github.com/prometheus/..."}, deep: true,
		why: "disks can be used without a server"},
	{pkg: "internal/cli/console", only: []string{"internal/words"}, deep: true,
		why: "what is said to people does not depend on the command that says it"},
	{pkg: "internal/cli/settings", only: []string{"internal/osfile", "internal/plainyaml",
		"internal/problems"},
		deep: true, why: "a table of settings knows neither the commands nor what they set"},
	{pkg: "internal/cli/xml", never: []string{"internal/daemon/...", "disk/image", "registry"},
		deep: true, why: "an element is made of flags and of what a daemon says, not by a daemon"},
	{pkg: "...", except: []string{"cmd/...", "internal/cli/..."},
		never: []string{"github.com/spf13/...", "cmd/...", "internal/cli/..."},
		deep:  true,
		why:   "only the command reads the command line"},
	{pkg: "cmd/...", never: []string{"github.com/stretchr/...", "go.uber.org/goleak", "testing",
		"target/targettest", "vhostuser/vhosttest", "disk/disktest/...", "integration/..."},
		deep: true, why: "test code must not get into the binary"},
}

// TestNothingOfKubernetes: this module needs none of the modules of Kubernetes, for its tests
// neither.
func TestNothingOfKubernetes(t *testing.T) {
	for _, file := range []string{"../../go.mod", "../../go.sum"} {
		require.NotRegexp(t, `(?m)^\s*(\S+\.)?k8s\.io/|kubevirt\.io/disk/kubernetes`, rig.ReadFile(t, file),
			file)
	}
}

func TestImportRules(t *testing.T) {
	pkgs := listPackages(t)
	for _, violation := range importViolations(pkgs, importRules) {
		t.Error(violation)
	}
}

// TestImportRulesBite checks that rules find direct and indirect violations, and that a rule that
// binds no package is reported.
func TestImportRulesBite(t *testing.T) {
	pkgs := []goPackage{
		{ImportPath: "target", Imports: []string{"disk", "fmt"},
			Deps: []string{"disk", "disk/qcow2", "fmt", "github.com/spf13/cobra"}},
		{ImportPath: "disk/qcow2", Imports: []string{"disk"}, Deps: []string{"disk"}},
		{ImportPath: "disk"},
	}
	got := importViolations(pkgs, []importRule{
		{pkg: "target", only: []string{"disk"}, never: []string{"disk/qcow2"}, why: "a"},
		{pkg: "target/...", never: []string{"github.com/spf13/..."}, deep: true, why: "b"},
		{pkg: "disk/qcow2", only: []string{}, why: "c"},
		{pkg: "...", except: []string{"target"}, never: []string{"disk"}, why: "d"},
		{pkg: "nowhere", only: []string{}, why: "e"},
		{pkg: "target", foreign: []string{}, deep: true, why: "g"},
		{pkg: "target", foreign: []string{"github.com/spf13/..."}, deep: true, why: "h"},
		{pkg: "later", only: []string{}, planned: true, why: "f"},
	})
	require.Equal(t, []string{
		"target depends on github.com/spf13/cobra, which it must not: b",
		"disk/qcow2 imports disk, which it must not: c",
		"disk/qcow2 imports disk, which it must not: d",
		`the rule for "nowhere" (e) binds no package: correct or remove it`,
		"target depends on github.com/spf13/cobra, which it must not: g",
	}, got)
}

// importViolations returns one sentence for each import that breaks a rule.
func importViolations(pkgs []goPackage, rules []importRule) []string {
	own := make(map[string]bool)
	for _, p := range pkgs {
		own[p.ImportPath] = true
	}
	var found []string
	for _, rule := range rules {
		bound := false
		for _, p := range pkgs {
			if !covers(rule.pkg, p.ImportPath) || coversAny(rule.except, p.ImportPath) {
				continue
			}
			bound = true
			imports, verb := p.Imports, "imports"
			if rule.deep {
				imports, verb = p.Deps, "depends on"
			}
			for _, path := range imports {
				unlisted := rule.only != nil && own[path] && !coversAny(rule.only, path) &&
					!(rule.files && coversAny(fileLeaves, path))
				foreign := rule.foreign != nil && thirdParty(path) && !coversAny(rule.foreign, path)
				if unlisted || foreign || coversAny(rule.never, path) {
					found = append(found,
						fmt.Sprintf("%s %s %s, which it must not: %s", p.ImportPath, verb, path,
							rule.why))
				}
			}
		}
		if !bound && !rule.planned {
			found = append(found, fmt.Sprintf("the rule for %q (%s) binds no package: correct or "+
				"remove it", rule.pkg, rule.why))
		}
	}
	return found
}

// thirdParty reports whether a path, relative to this module, belongs to another module: its first
// element is a host name.
func thirdParty(path string) bool {
	host, _, _ := strings.Cut(path, "/")
	return strings.Contains(host, ".")
}

// covers reports whether a pattern ("x" or "x/...") includes the path.
func covers(pattern, path string) bool {
	prefix, tree := strings.CutSuffix(pattern, "...")
	if !tree {
		return pattern == path
	}
	return strings.HasPrefix(path, prefix) || path == strings.TrimSuffix(prefix, "/")
}

func coversAny(patterns []string, path string) bool {
	for _, pattern := range patterns {
		if covers(pattern, path) {
			return true
		}
	}
	return false
}

// listPackages asks the go command for every package of the module as it is built for Linux,
// without test files.
func listPackages(t *testing.T) []goPackage {
	t.Helper()
	cmd := exec.Command("go", "list", "-e", "-json=ImportPath,Dir,GoFiles,Imports,Deps", "./...")
	cmd.Dir = "../.."
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out := testtool.Must(cmd.Output())(t, "go list: %s", stderr.String())

	var pkgs []goPackage
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p goPackage
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else {
			require.NoError(t, err)
		}
		p.ImportPath = relative(p.ImportPath)
		for _, list := range [][]string{p.Imports, p.Deps} {
			for i := range list {
				list[i] = relative(list[i])
			}
			sort.Strings(list)
		}
		pkgs = append(pkgs, p)
	}
	require.NotEmpty(t, pkgs)
	return pkgs
}

// relative cuts off the module's path. The packages of the module start with its directories, those
// of other modules with a host name.
func relative(path string) string {
	return strings.TrimPrefix(path, module+"/")
}
