package pages

import (
	"net/http"
	"os"
)

// PlaceHeader is the header by which every page tells in which container its daemon is. The
// containers of a pod share one network, so that a client may have asked the daemon of another one.
const PlaceHeader = "Kubevirt-Disk-Place"

// Place names the container of this process by its view of the file systems, as each container has
// one of its own. "": it cannot be told.
func Place() string {
	place, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return ""
	}
	return place
}

// withPlace has a handler tell where it is.
func withPlace(h http.Handler) http.Handler {
	place := Place()
	if place == "" {
		return h
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(PlaceHeader, place)
		h.ServeHTTP(w, r)
	})
}
