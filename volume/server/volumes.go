package server

import (
	_ "embed"
	"net"
	"net/http"
	"strconv"
	"time"

	"go.uber.org/zap"

	"kubevirt.io/disk/volume"
	"kubevirt.io/disk/volume/api"
	"kubevirt.io/disk/volume/store"
)

//go:embed openapi.yaml
var openAPI []byte

func document(w http.ResponseWriter, _ *http.Request) error {
	w.Header().Set("Content-Type", typeYAML)
	_, _ = w.Write(openAPI) // if this fails, the client has gone
	return nil
}

// nameOf returns the name of the volume that a request is about.
func nameOf(r *http.Request) string {
	if name := r.PathValue("name"); name != "" {
		return name
	}
	return api.DefaultName
}

func (s *Server) put(w http.ResponseWriter, r *http.Request) error {
	spec, err := readSpec(w, r)
	if err != nil {
		return err
	}
	v, created, err := s.opt.Volumes.Put(r.Context(), nameOf(r), spec)
	if err != nil {
		return err
	}
	status := http.StatusOK
	switch {
	case v.State == api.StateAwaiting || v.State == api.StateFilling:
		status = http.StatusAccepted
	case created:
		status = http.StatusCreated
	}
	if created {
		s.opt.Log.Info("a client has made a volume", zap.String("volume", v.Record.Name),
			zap.String("client", r.RemoteAddr))
	}
	if status != http.StatusOK {
		w.Header().Set("Location", "/volume/"+v.Record.Name)
	}
	write(w, r, status, s.answer(r, v))
	return nil
}

func (s *Server) get(w http.ResponseWriter, r *http.Request) error {
	v, err := s.opt.Volumes.Get(nameOf(r))
	if err != nil {
		return err
	}
	status := http.StatusOK
	if v.State == api.StateAwaiting || v.State == api.StateFilling {
		status = http.StatusAccepted
	}
	write(w, r, status, s.answer(r, v))
	return nil
}

// Answer answers a request with the state of a volume.
func (s *Server) Answer(w http.ResponseWriter, r *http.Request, status int, name string) {
	v, err := s.opt.Volumes.Get(name)
	if err != nil {
		Refuse(w, r, err)
		return
	}
	w.Header().Set("Location", "/volume/"+v.Record.Name)
	write(w, r, status, s.answer(r, v))
}

func (s *Server) list(w http.ResponseWriter, r *http.Request) error {
	all := api.List{Volumes: []api.Volume{}}
	for _, v := range s.opt.Volumes.List() {
		all.Volumes = append(all.Volumes, s.answer(r, v))
	}
	write(w, r, http.StatusOK, all)
	return nil
}

func (s *Server) delete(w http.ResponseWriter, r *http.Request) error {
	force := false
	if text := r.URL.Query().Get("force"); text != "" {
		var err error
		if force, err = strconv.ParseBool(text); err != nil {
			return api.Errorf(api.CodeInvalid, "force: %q is neither true nor false", text)
		}
	}
	if err := s.opt.Volumes.Delete(r.Context(), nameOf(r), force); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// answer returns what a client sees of a volume.
func (s *Server) answer(r *http.Request, v volume.Volume) api.Volume {
	a := api.Volume{Info: api.Info{
		Name: v.Record.Name, State: v.State, Size: api.Size(v.Record.Size),
		BlockSize: v.Record.BlockSize,
		From:      v.Record.Spec.From.Shown(), Copy: v.Record.Spec.Copy,
		Serial: v.Serial, NAA: v.NAA, Created: v.Record.Created,
		Upload: v.Upload, Failure: v.Failure, Waits: v.Waits,
	}}
	if v.State != api.StateReady {
		return a
	}
	a.Info.Upload = nil // the volume has all its data
	a.AccessMode = v.Record.Spec.AccessMode
	if v.Record.Place.Kind == store.PlaceClaim {
		a.PVC = v.Record.Spec.PVC
		return a
	}
	local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if host, port := s.opt.Portal(local); port != "" {
		a.ISCSI = &api.ISCSI{Host: api.Host{Name: host, Port: port}, Portal: s.opt.TargetName,
			LUN: v.Record.LUN}
	}
	return a
}

// readSpec reads the description of a volume from a request.
func readSpec(w http.ResponseWriter, r *http.Request) (api.Spec, error) {
	text, err := readBody(w, r)
	if err != nil {
		return api.Spec{}, err
	}
	// Without this, the deadline for the body would end the work on the request.
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
	spec, err := parseSpec(text, r.Header.Get("Content-Type"))
	if err != nil {
		return api.Spec{}, api.Errorf(api.CodeInvalid, "the request cannot be understood: %v", err)
	}
	return spec, nil
}
