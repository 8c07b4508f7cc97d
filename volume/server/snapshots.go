package server

import (
	"net/http"
	"strconv"

	"kubevirt.io/disk/volume/api"
)

func (s *Server) listSnapshots(w http.ResponseWriter, r *http.Request) error {
	all, err := s.opt.Volumes.Snapshots(r.Context(), nameOf(r))
	if err != nil {
		return err
	}
	write(w, r, http.StatusOK, api.Snapshots{Snapshots: append([]api.Snapshot{}, all...)})
	return nil
}

func (s *Server) takeSnapshot(w http.ResponseWriter, r *http.Request) error {
	one, made, err := s.opt.Volumes.TakeSnapshot(r.Context(), nameOf(r), r.PathValue("snapshot"))
	if err != nil {
		return err
	}
	status := http.StatusOK
	if made {
		status = http.StatusCreated
		w.Header().Set("Location", r.URL.Path)
	}
	write(w, r, status, one)
	return nil
}

func (s *Server) getSnapshot(w http.ResponseWriter, r *http.Request) error {
	one, err := s.opt.Volumes.Snapshot(r.Context(), nameOf(r), r.PathValue("snapshot"))
	if err != nil {
		return err
	}
	write(w, r, http.StatusOK, one)
	return nil
}

func (s *Server) changes(w http.ResponseWriter, r *http.Request) error {
	query, offset := r.URL.Query(), int64(0)
	if text := query.Get("offset"); text != "" {
		var err error
		if offset, err = strconv.ParseInt(text, 10, 64); err != nil || offset < 0 {
			return api.Errorf(api.CodeInvalid, "offset: %q is not a number of bytes", text)
		}
	}
	c, err := s.opt.Volumes.Changes(r.Context(), nameOf(r), r.PathValue("snapshot"),
		api.Page{Until: query.Get("until"), Of: query.Get("of"), Offset: offset})
	if err != nil {
		return err
	}
	write(w, r, http.StatusOK, c)
	return nil
}

func (s *Server) deleteSnapshot(w http.ResponseWriter, r *http.Request) error {
	err := s.opt.Volumes.DeleteSnapshot(r.Context(), nameOf(r), r.PathValue("snapshot"))
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) revert(w http.ResponseWriter, r *http.Request) error {
	if err := s.opt.Volumes.Revert(r.Context(), nameOf(r), r.PathValue("snapshot")); err != nil {
		return err
	}
	return s.get(w, r)
}
