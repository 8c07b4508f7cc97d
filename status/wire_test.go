package status

import (
	"encoding/json"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// The page and the requests as daemons of other versions write and read them. A field that is
// renamed, removed or left out in other cases than before breaks somebody: only add fields here.

// TestStatusOnTheWire reads a page and writes the same again: one with a value in each field, and
// one that shows which fields are absent without a value.
func TestStatusOnTheWire(t *testing.T) {
	for name, full := range map[string]bool{"full.json": true, "zero.json": false} {
		text := testtool.Must(os.ReadFile("testdata/" + name))(t)
		s := decode[Status](t, string(text))
		if full {
			requireFull(t, "Status", reflect.ValueOf(s))
		}
		again := testtool.Must(json.MarshalIndent(s, "", "  "))(t)
		require.Equal(t, string(text), string(again)+"\n", name)
	}
}

func TestMessagesOnTheWire(t *testing.T) {
	message[Handover](t, `{"action":"open","lun":1,"to":"iqn.b","seconds":1.5}`,
		`{"action":"","lun":0}`)
	message[Kick](t, `{"initiator":"iqn.a","session":3}`, `{}`)
	message[HandoverAnswer](t, `{"done":"it is"}`, `{"done":""}`)
	message[SessionsAnswer](t, ``, `{"sessions":null}`)
	message[KickAnswer](t, ``, `{"ended":null}`)
	message[SnapshotRequest](t, `{"action":"create","disks":["a"],"name":"s","image":"i",`+
		`"identity":"j"}`,
		`{"action":"","disks":null,"name":""}`)
	message[SnapshotAnswer](t, `{"done":"it is"}`, `{"done":""}`)
	message[SnapshotsAnswer](t, `{"snapshots":[{"disk":"a","lun":1,"name":"s",`+
		`"created":"2026-11-26T08:00:00Z","size":512,"used":1,"served":2}]}`,
		`{"snapshots":null}`)
	message[Content](t, `{"disk":"a","identity":"i","size":512,"image":["sha256:0"],`+
		`"reference":"r","committed":{"i":"s"}}`,
		`{"disk":"","identity":"","size":0}`)
	message[ContentRanges](t, `{"ranges":[[0,512]],"next":1024}`, `{"ranges":null,"next":0}`)
	message[Refusal](t, `{"error":"no"}`, `{"error":""}`)
	require.Equal(t, []Action{"open", "finish", "cancel"},
		[]Action{ActionOpen, ActionFinish, ActionCancel})
	require.Equal(t, []SnapshotAction{"create", "delete", "revert", "serve", "unserve",
		"committed"},
		[]SnapshotAction{SnapshotCreate, SnapshotDelete, SnapshotRevert, SnapshotServe,
			SnapshotUnserve, SnapshotCommitted})
	require.Equal(t, []string{"/handover", "/sessions", "/kick", "/snapshots", "/content",
		"/content/bytes", "/content/ranges", "stored", "changed"},
		[]string{PathHandover, PathSessions, PathKick, PathSnapshots, PathContent,
			PathContentBytes, PathContentRanges, RangesStored, RangesChanged})
}

// TestControllerAsks checks the request that the Kubernetes controller puts into an annotation. It
// compares the text with what is there already, which an earlier version may have written.
func TestControllerAsks(t *testing.T) {
	text := testtool.Must(json.Marshal(Handover{Action: ActionFinish, LUN: 1, To: "iqn.b"}))(t)
	require.Equal(t, `{"action":"finish","lun":1,"to":"iqn.b"}`, string(text))
}

// message checks a message with a value in each field (if its fields are not those of a page), and
// one without any.
func message[T any](t *testing.T, full, zero string) {
	t.Helper()
	var none T
	text := testtool.Must(json.Marshal(none))(t)
	require.Equal(t, zero, string(text))
	if full == "" {
		return
	}
	m := decode[T](t, full)
	requireFull(t, reflect.TypeFor[T]().Name(), reflect.ValueOf(m))
	text = testtool.Must(json.Marshal(m))(t)
	require.Equal(t, full, string(text))
}

func decode[T any](t *testing.T, text string) (v T) {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(text))
	d.DisallowUnknownFields()
	require.NoError(t, d.Decode(&v))
	return v
}

// requireFull checks that each field has a value: a new field belongs into these tests.
func requireFull(t *testing.T, at string, v reflect.Value) {
	t.Helper()
	switch {
	case v.Kind() == reflect.Pointer && !v.IsNil():
		requireFull(t, at, v.Elem())
	case v.Kind() == reflect.Slice && v.Len() > 0:
		requireFull(t, at, v.Index(0))
	case v.Kind() == reflect.Struct && v.Type() != reflect.TypeFor[time.Time]():
		for i := range v.NumField() {
			requireFull(t, at+"."+v.Type().Field(i).Name, v.Field(i))
		}
	default:
		require.False(t, v.IsZero(), "%s has no value in the test", at)
	}
}
