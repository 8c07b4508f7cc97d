package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/status"
	"kubevirt.io/disk/target/targettest"
)

// wishing is a daemon that follows the annotations of its pod.
type wishing struct {
	*process
	file string
}

// annotate replaces the file as the downward API does.
func (p *wishing) annotate(value string) {
	p.t.Helper()
	text := ""
	if value != "" {
		text = handoverAnnotation + "=" + strconv.Quote(value) + "\n"
	}
	require.NoError(p.t, os.WriteFile(p.file+".new", []byte(text), 0o600))
	require.NoError(p.t, os.Rename(p.file+".new", p.file))
}

// answer waits until the page shows what became of a request, and returns the status of the LUN.
func (p *wishing) answer(value string, ok func(h *status.HandoverOutcome) bool) status.LUN {
	p.t.Helper()
	var s status.Status
	p.until("the page tells of "+value, func() bool {
		_, body := p.page("/status")
		s = status.Status{}
		require.NoError(p.t, json.Unmarshal([]byte(body), &s))
		return s.Handover != nil && s.Handover.Asked == value && ok(s.Handover)
	})
	return s.LUNs[0]
}

// TestHandoverByAnnotation hands a LUN over and back by an annotation of the pod. A restart with
// the annotation in place changes nothing.
func TestHandoverByAnnotation(t *testing.T) {
	const first = "iqn.2020-01.test:first"
	l := newPlace(t, "a.raw")
	l.env = append(l.env, "PERSISTENT_DIR="+t.TempDir())
	p := &wishing{file: filepath.Join(t.TempDir(), "annotations")}
	require.NoError(t, os.WriteFile(p.file, nil, 0o600))
	p.process = l.serve(t, "POD_ANNOTATIONS="+p.file)
	done := func(h *status.HandoverOutcome) bool { return h.Done != "" }
	failed := func(h *status.HandoverOutcome) bool { return h.Error != "" }
	step := func(action, to string) string {
		return `{"action":"` + action + `","lun":1,"to":"` + to + `"}`
	}
	block := make([]byte, 512)
	one := p.login(first, 1)
	one.MustGood(t, targettest.Write10(1, 0, block))

	for _, wrong := range []string{"open", `{"action":"open","lun":7,"to":"` + second + `"}`,
		`{"action":"finish","lun":1}`, step("finish", second)} {
		p.annotate(wrong)
		require.Empty(t, p.answer(wrong, failed).OpenTo, wrong)
	}
	open := step("open", second)
	p.annotate(open)
	require.Equal(t, second, p.answer(open, done).OpenTo)
	two := p.login(second, 1)
	two.MustGood(t, targettest.Write10(1, 0, block))
	finish := step("finish", second)
	p.annotate(finish)
	lun := p.answer(finish, done)
	require.Equal(t, second, lun.Owner)
	require.Equal(t, []string{first}, lun.Fenced)
	one.MustFail(t, targettest.Write10(1, 0, block), "status 0x18")

	require.Equal(t, exitDone, p.terminate())
	p.process = l.serve(t, "POD_ANNOTATIONS="+p.file)
	two = p.login(second, 1)
	two.MustGood(t, targettest.Write10(1, 0, block))
	lun = p.answer(finish, func(*status.HandoverOutcome) bool { return true })
	require.Equal(t, []string{first}, lun.Fenced)

	back := step("open", first)
	p.annotate(back)
	require.Equal(t, first, p.answer(back, done).OpenTo)
	one = p.login(first, 1)
	one.MustGood(t, targettest.Write10(1, 0, block))
	cancel := step("cancel", first)
	p.annotate(cancel)
	lun = p.answer(cancel, done)
	require.Equal(t, []string{first}, lun.Fenced)
	two.MustGood(t, targettest.Write10(1, 0, block))
	// Removing the annotation does not undo the handover.
	p.annotate("")
	require.Equal(t, exitDone, p.terminate())
}
