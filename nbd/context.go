package nbd

import (
	"encoding/binary"
	"slices"
	"strings"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/serving"
)

// contextSet are metadata contexts: a bit for each identifier.
type contextSet uint32

// The metadata contexts that this server knows.
const (
	contextAllocation      = 1 // base:allocation
	contextDepth           = 2 // qemu:allocation-depth
	contextSession         = 3 // names the client's session; not in BLOCK_STATUS
	contextMigrationTarget = 4 // the client is the target of a live migration; not in BLOCK_STATUS
	// This and the following ones say what has changed since a snapshot: qemu:dirty-bitmap:NAME.
	contextBitmap = 5
	// maxBitmaps is for how many snapshots an export has contexts: the newest ones.
	maxBitmaps = 27
)

// bitmapContext is followed by the name of a snapshot.
const bitmapContext = "qemu:dirty-bitmap:"

// metaContext is a metadata context that has a status.
type metaContext struct {
	id   uint32
	name string
}

// contextsOf returns the contexts of a disk, and the snapshots for those from contextBitmap on, in
// the order of their identifiers.
func contextsOf(d *serving.Disk) (all []metaContext, since []disk.Snapshot) {
	all = []metaContext{{contextAllocation, "base:allocation"},
		{contextDepth, "qemu:allocation-depth"}}
	if d.History == nil {
		return all, nil
	}
	since = d.History.Since()
	since = since[max(0, len(since)-maxBitmaps):]
	for i, one := range since {
		all = append(all, metaContext{contextBitmap + uint32(i), bitmapContext + one.Name})
	}
	return all, since
}

func (s contextSet) has(id uint32) bool        { return s&(1<<id) != 0 }
func (s contextSet) with(id uint32) contextSet { return s | 1<<id }

// matches reports whether a client's query asks for a context. A LIST may ask for a whole namespace
// by its name and a colon.
func matches(query, name string, list bool) bool {
	return query == name || list && strings.HasSuffix(query, ":") && strings.HasPrefix(name, query)
}

// meta handles LIST_META_CONTEXT and SET_META_CONTEXT.
func (h *handshake) meta(o option) error {
	list := o.number == optListMeta
	if !list {
		h.contexts, h.contextsOf, h.session, h.migrationTarget, h.snapshots = 0, "", "", false, nil
		h.contextsOn, h.diskInfo = nil, diskInfo{}
	}
	r, err := decodeMetaRequest(o.data)
	switch {
	case err != nil:
		return h.refuse(o, repErrInvalid, "%v", err)
	case !h.c.structured:
		return h.refuse(o, repErrInvalid, "metadata contexts need structured replies")
	}
	d, err := h.c.srv.find(r.name)
	if err != nil {
		return h.refuse(o, repErrUnknown, "%v", err)
	}
	session, err := sessionIn(r.queries)
	switch {
	case list:
		session = ""
	case err != nil:
		return h.refuse(o, repErrInvalid, "%v", err)
	case session != "" && d.Superseded(h.c.name, session):
		return h.refuse(o, repErrPolicy, "%v", errSuperseded)
	case session != "":
		if h.diskInfo, err = diskInfoOf(d, h.c.name, session); err != nil {
			return h.refuse(o, repErrUnknown, "%v", err) // may pass; repErrPolicy is for good
		}
		if err := h.replyContext(o, contextSession, h.diskInfo.encode()); err != nil {
			return err
		}
	}
	migrationTarget := session != "" && slices.Contains(r.queries, migrationTargetContext)
	if migrationTarget {
		if err := h.replyContext(o, contextMigrationTarget, migrationTargetContext); err != nil {
			return err
		}
	}
	var set contextSet
	all, since := contextsOf(d)
	for _, one := range all {
		wanted := list && len(r.queries) == 0
		for _, q := range r.queries {
			wanted = wanted || matches(q, one.name, list)
		}
		if !wanted {
			continue
		}
		set = set.with(one.id)
		shown := one.id
		if list {
			shown = 0 // the identifier means nothing there
		}
		if err := h.replyContext(o, shown, one.name); err != nil {
			return err
		}
	}
	if !list {
		h.contexts, h.contextsOf, h.contextsOn, h.snapshots = set, r.name, d, since
		h.session, h.migrationTarget = session, migrationTarget
	}
	return h.ack(o)
}

// replyContext tells the client of a metadata context.
func (h *handshake) replyContext(o option, id uint32, name string) error {
	return h.reply(o, repMetaContext, append(binary.BigEndian.AppendUint32(nil, id), name...))
}
