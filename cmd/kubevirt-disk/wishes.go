package main

import (
	"context"
	"time"

	"kubevirt.io/disk/internal/osfile"
)

const (
	// handoverAnnotation asks for a step of a handover. Only users who may change the pod can set
	// it.
	handoverAnnotation = "disk.kubevirt.io/handover"
	// wishPoll is how often the annotations are read. A live migration waits that long.
	wishPoll = time.Second
)

// wishes carries out the handovers that an annotation of the pod asks for.
type wishes struct {
	path string // of the downward API's file
	want func(ctx context.Context, asked string) (done bool)
	done string // the last request that was done
}

// look does what the annotation asks for, once. If the file cannot be read, as while it is being
// replaced, look does nothing.
func (w *wishes) look(ctx context.Context) {
	text, err := osfile.ReadText(w.path)
	if err != nil {
		return
	}
	annotations, err := parseAnnotations(text)
	asked := annotations[handoverAnnotation]
	if err != nil || asked == w.done {
		return
	}
	w.done = ""
	if asked == "" || w.want(ctx, asked) {
		w.done = asked
	}
}
