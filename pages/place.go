package pages

import (
	"net/http"
	"os"
)

// PlaceHeader is the header in which each page names the container of its daemon. The containers of
// a pod share a network, so a client may reach the daemon of another container.
const PlaceHeader = "Kubevirt-Disk-Place"

// Place identifies the container of this process by its mount namespace, or returns "" if it is
// unknown.
func Place() string {
	place, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return ""
	}
	return place
}

// withPlace adds PlaceHeader to the answers of a handler.
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
