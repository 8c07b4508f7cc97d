package libvirt

import (
	"math"
	"time"
)

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
