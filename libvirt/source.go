package libvirt

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"time"
)

// ParseSources reads the disk sources of a virtual machine's specification and returns their LUNs
// in order. People write these in YAML; the argument is the decoded YAML or JSON. It may start at
// any of three levels: the map with "disks", one disk with "source", or one source with "iscsi" or
// "nbd":
//
//	disks:
//	  - source:
//	      iscsi:
//	        host:
//	          name: iscsi-demo-target
//	          port: "3260"
//	        portal: iqn.2017-01.io.kubevirt:sn.42
//	        lun: 2
//	    access-mode: write-exclusive
//	    copy: {mode: copy-on-write, usage-type: fast}
//	  - source:
//	      nbd:
//	        host: {name: disks.example.com, port: "10809"} # or socket: /run/disk/nbd.sock
//	        export: fedora.qcow2
//	        tls: true
//	        reconnect: 30
//
// "lun" may also stand beside "iscsi", as in the answers of dynamic sources. Here "portal" is the
// target's name. The disk of "nbd" is in LUN.NBD: host or socket is needed, the other keys are
// those of Export, and "reconnect" has seconds. "access-mode" is one of the names of AccessMode, or
// "read-only". "copy" is for the server, see LUN.Copy; only the server knows which usage types
// exist. Other keys are ignored.
func ParseSources(document map[string]any) ([]LUN, error) {
	var p problems
	var luns []LUN
	if list, ok := document["disks"]; ok {
		disks, ok := list.([]any)
		if !ok {
			p.add("disks", "want a list of disks")
		}
		for i, one := range disks {
			luns = append(luns, parseDiskSpec(one, fmt.Sprintf("disks[%d]", i), &p))
		}
	} else {
		luns = append(luns, parseDiskSpec(document, "", &p))
	}
	if err := p.err(); err != nil {
		return nil, err
	}
	return luns, nil
}

// parseDiskSpec reads one disk: a map with "source", or the source itself.
func parseDiskSpec(value any, path string, p *problems) LUN {
	spec, ok := value.(map[string]any)
	if !ok {
		p.add(path, "want a disk with a source")
		return LUN{}
	}
	source, sourcePath := spec, path
	if inner, ok := spec["source"]; ok {
		sourcePath = join(path, "source")
		if source, ok = inner.(map[string]any); !ok {
			p.add(sourcePath, "want a source with iscsi or nbd")
			return LUN{}
		}
	}
	var l LUN
	switch mode, ok := spec["access-mode"].(string); {
	case spec["access-mode"] == nil:
	case !ok:
		p.add(join(path, "access-mode"), "want a string: %s or read-only", oneOf(accessModes()))
	case mode == "read-only":
		l.ReadOnly = true
	default:
		l.AccessMode = AccessMode(mode)
	}
	before := len(p.list)
	l.Copy = parseCopy(spec, path, p)
	lunPath := ""
	if source["nbd"] != nil {
		l.NBD = parseNBDSource(source, sourcePath, p)
	} else {
		lunPath = parseSource(source, sourcePath, &l, p)
	}
	l = l.withDefaults()
	if len(p.list) > before {
		return l // check would only report missing values again, as empty
	}
	checked := problems{name: func(field string) string {
		switch field {
		case "LUN.TargetName":
			return join(sourcePath, "iscsi.portal")
		case "LUN.Number":
			return lunPath
		case "LUN.AccessMode":
			return join(path, "access-mode")
		}
		if name, ok := nbdKeys[field]; ok {
			return join(sourcePath, name)
		}
		return join(sourcePath, "iscsi.host.name")
	}}
	l.check(&checked)
	p.list = append(p.list, checked.list...)
	return l
}

// parseCopy reads "copy" of a disk.
func parseCopy(spec map[string]any, path string, p *problems) (c Copy) {
	path = join(path, "copy")
	if spec["copy"] == nil {
		return c
	}
	given, ok := spec["copy"].(map[string]any)
	if !ok {
		p.add(path, "want mode and usage-type")
		return c
	}
	refuseOthers(given, path, p, "mode", "usage-type")
	text := func(key string) string {
		value, ok := given[key].(string)
		if _, set := given[key]; set && (!ok || value == "") {
			p.add(join(path, key), "want a text that is not empty")
		}
		return value
	}
	c = Copy{Mode: CopyMode(text("mode")), UsageType: text("usage-type")}
	knownOrEmpty(p, join(path, "mode"), c.Mode, copyModes())
	return c
}

// parseSource reads the map that has "iscsi". It returns the path of the LUN in it.
func parseSource(source map[string]any, path string, l *LUN, p *problems) (lunPath string) {
	iscsiPath := join(path, "iscsi")
	iscsi, ok := source["iscsi"].(map[string]any)
	if !ok {
		p.add(iscsiPath, "it is missing: another kind of source (this has %v) names no LUN "+
			"until it is resolved", slices.Sorted(maps.Keys(source)))
		return ""
	}
	refuseOthers(iscsi, iscsiPath, p, "host", "portal", "lun")
	portal := parseHost(iscsi, iscsiPath, p)
	l.Portals = []Portal{portal}
	l.TargetName, _ = iscsi["portal"].(string)

	inside, isInside := iscsi["lun"]
	beside, isBeside := source["lun"]
	if !isInside && !isBeside {
		p.add(join(iscsiPath, "lun"), "it is missing: want the LUN, from 1")
		return ""
	}
	lunPath = join(iscsiPath, "lun")
	if !isInside {
		inside, lunPath = beside, join(path, "lun")
	}
	n, ok := integer(inside)
	if !ok {
		p.add(lunPath, "%v is not a LUN: want 1 to %d", inside, MaxLUN)
	}
	if isInside && isBeside {
		if other, ok := integer(beside); !ok || other != n {
			p.add(lunPath, "%v differs from the LUN beside iscsi, %v: want only one", inside,
				beside)
		}
	}
	l.Number = n
	return lunPath
}

func parseHost(source map[string]any, path string, p *problems) Portal {
	path = join(path, "host")
	host, ok := source["host"].(map[string]any)
	if !ok {
		p.add(path, "it is missing: want name and port")
	}
	refuseOthers(host, path, p, "name", "port")
	name, _ := host["name"].(string)
	portal := Portal{Host: name}
	if port, given := host["port"]; given {
		n, ok := integer(port)
		if !ok || n < 1 || n > math.MaxUint16 {
			p.add(join(path, "port"), "%v is not a port: want 1 to 65535", port)
		}
		portal.Port = uint16(n)
	}
	return portal
}

// refuseOthers reports unknown keys. They would have no effect and are most likely misspelt.
func refuseOthers(m map[string]any, path string, p *problems, keys ...string) {
	for _, key := range slices.Sorted(maps.Keys(m)) {
		if !slices.Contains(keys, key) {
			p.add(join(path, key), "the key is unknown: want %s", oneOf(keys))
		}
	}
}

// integer reads a number as decoders of YAML and JSON represent it, or from a string.
func integer(value any) (int, bool) {
	switch v := value.(type) {
	case int:
		return v, true
	case int64:
		return int(v), true
	case uint64:
		return int(v), v <= math.MaxInt
	case float64:
		return int(v), v == math.Trunc(v) && math.Abs(v) <= 1<<53
	case json.Number:
		return integer(string(v))
	case string:
		n, err := strconv.Atoi(v)
		return n, err == nil
	}
	return 0, false
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// nbdKeys are the keys of a source for the fields of an Export.
var nbdKeys = map[string]string{
	"Export.Name": "nbd.export", "Export.Socket": "nbd.socket", "Export.Portal": "nbd.host",
	"Export.Portal.Host": "nbd.host.name", "Export.TLS": "nbd.tls",
	"Export.Reconnect": "nbd.reconnect",
}

// parseNBDSource reads the map that has "nbd".
func parseNBDSource(source map[string]any, path string, p *problems) *Export {
	for _, key := range []string{"iscsi", "lun"} {
		if source[key] != nil {
			p.add(join(path, key), "there is nbd, too: want only one kind of source")
		}
	}
	path = join(path, "nbd")
	nbd, ok := source["nbd"].(map[string]any)
	if !ok {
		p.add(path, "want host or socket, and perhaps export, tls and reconnect")
		return nil
	}
	refuseOthers(nbd, path, p, "host", "socket", "export", "tls", "reconnect")
	text := func(key string) string {
		value, ok := nbd[key].(string)
		if nbd[key] != nil && !ok {
			p.add(join(path, key), "want a text")
		}
		return value
	}
	e := &Export{Name: text("export"), Socket: text("socket")}
	switch {
	case nbd["host"] != nil && e.Socket != "":
		p.add(join(path, "host"), "there is a socket, too: leave one of them out")
	case nbd["host"] != nil:
		e.Portal = parseHost(nbd, path, p)
	case e.Socket == "":
		p.add(path, "it has neither host nor socket: want one of them")
	}
	if value := nbd["tls"]; value != nil {
		if e.TLS, ok = value.(bool); !ok {
			p.add(join(path, "tls"), "want true or false")
		}
	}
	if value := nbd["reconnect"]; value != nil {
		seconds, ok := integer(value)
		if !ok || seconds < 0 || seconds > math.MaxInt32 {
			p.add(join(path, "reconnect"), "%v is not a number of seconds", value)
		}
		e.Reconnect = time.Duration(seconds) * time.Second
	}
	return e
}
