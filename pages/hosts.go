package pages

import (
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
)

// privateEnds are the ends of names that cannot be registered in the public DNS.
var privateEnds = []string{".localhost", ".local", ".internal", ".svc"}

// OnlyHosts answers a request only if it is for a possible name of this server: an address, this
// machine, a name without a dot, a name in privateEnds (also one of a Service), in the machine's
// own search domains, or in more. Otherwise a hostile web page could let a browser read the pages
// under a name whose address changes (DNS rebinding). Probes are answered in any case: a kubelet
// may use another name, and their answers contain little.
func OnlyHosts(next http.Handler, more []string, setting string) http.Handler {
	names, ends := slices.Clone(more), append(searchDomains("/etc/resolv.conf"), privateEnds...)
	if own, err := os.Hostname(); err == nil {
		names = append(names, own)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		probe := r.URL.Path == "/healthz" || r.URL.Path == "/readyz"
		if !probe && !knownHost(r.Host, names, ends) {
			http.Error(w, "this server does not know that it has this name: use its address, or "+
				"add the name with "+setting, http.StatusMisdirectedRequest)
			return
		}
		next.ServeHTTP(w, r)
	})
}

func knownHost(host string, names, ends []string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.ToLower(strings.TrimSuffix(strings.Trim(host, "[]"), "."))
	if _, err := netip.ParseAddr(host); err == nil {
		return true
	}
	same := func(name string) bool { return strings.EqualFold(name, host) }
	under := func(end string) bool { return strings.HasSuffix(host, end) }
	return !strings.Contains(host, ".") || slices.ContainsFunc(names, same) ||
		slices.ContainsFunc(ends, under)
}

// searchDomains returns the domains in which this machine looks for short names, each with a dot
// before it. In a pod, they are those of the cluster.
func searchDomains(path string) (all []string) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		if len(words) == 0 || words[0] != "search" {
			continue
		}
		for _, domain := range words[1:] {
			if domain = strings.ToLower(strings.Trim(domain, ".")); strings.Contains(domain, ".") {
				all = append(all, "."+domain)
			}
		}
	}
	return all
}
