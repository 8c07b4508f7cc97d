package pages

import (
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"kubevirt.io/disk/disk"
	"kubevirt.io/disk/status"
)

const (
	// These limit the content and the cost of one page.
	rowsPerPage     = 100
	sessionsPerPage = 100
	uploadsPerPage  = 50
	alarmsPerPage   = 20
	// manyLUNs is the largest number of LUNs that get more than one line each.
	manyLUNs = 10

	// stripCells is the largest number of cells in the map of each LUN in the table. It takes at
	// most some 12 KiB in a browser, and the map of the selected LUN less than 64 KiB.
	stripCells = 512
)

// view has the texts of the page. The template writes it into HTML.
type view struct {
	Title                                 string // of the browser's tab
	State, Target, Portals, Auth, Version string
	Headline                              string  // the problem; "": none
	Alarms                                []alarm // the LUNs and volumes that are in trouble
	MoreAlarms                            string  // "": all are shown
	Starting                              string  // the reason why the start is not complete
	Short                                 bool    // one line for each LUN
	Uptime, Reading, Writing              string
	LUNs, Sessions                        string // their numbers
	Rows                                  []row
	Before, After                         string // query of the other rows; "": none
	Paged                                 bool   // there is one of them
	Missing                               string // the requested LUN, which does not exist
	Uploads                               []job
	MoreUploads                           string // "": all are shown
	One                                   *detail
	Users                                 []user
	MoreUsers                             string // "": all are shown
	Refused                               []refusal
}

// row is a LUN in the table.
type row struct {
	LUN               uint16
	Name, Kind, Size  string
	State, Note       string // Note describes the state; may be empty
	Jobs              []job
	Owner             string
	OpenTo, Fenced    string // "": no initiator
	ReadOps, WriteOps string
	OpsUp, OpsDown    string // of the chart
	OpsTop            string
	ReadRate          string
	WriteRate         string
	RateUp, RateDown  string
	RateTop           string
	ReadTime          string
	WriteTime         string
	Cells             int // of the map; 0: there is none
	Map               mapPaths
	Summary           string // of the map
	Selected          bool
}

// job is work with an end that goes on while the guest runs.
type job struct{ ID, What, Done, Percent, Left string }

// detail has the texts about one LUN.
type detail struct {
	LUN                             uint16
	Name                            string
	Rows, Columns                   int // of the map
	Cell                            string
	Map                             mapPaths
	Image, Copied, Written, Hole    string
	Serial, NAA, Format, Mode, Kept string
	Digest, Platform                string // of the image; "": none
	Access, Space                   string
	Portal                          string
	CHAP                            bool
	Commands                        *commands    // nil: there is no iSCSI
	NBD                             *nbdCommands // nil: there is no NBD
	VhostUser                       *vhostUserCommands
}

// user is a session.
type user struct {
	ID, Name, Alias, From, Since, LUNs, InFlight, Commands, Read, Written string
}

// selection is the part of the LUNs that a client looks at.
type selection struct {
	from, lun uint16 // 0: the first
}

func selectionOf(q url.Values) (p selection) {
	number := func(name string) uint16 {
		n, _ := strconv.ParseUint(q.Get(name), 10, 16)
		return uint16(n)
	}
	return selection{from: number("from"), lun: number("lun")}
}

// snapshot is the state of the daemon at one moment.
type snapshot struct {
	now    time.Time
	status status.Status
	rates  *rates
	maps   func(lun uint16) *disk.Map // nil: unknown
	// asked is the daemon's address in the client's request, and local the one that it has reached.
	// They only affect the commands.
	asked, local string
}

// view makes the texts.
func (s *snapshot) view(at selection) *view {
	st := &s.status
	v := &view{State: string(st.State), Target: st.TargetName,
		Portals: plain(strings.Join(append(slices.Clone(st.Portals), st.NBDPortals...), ", ")),
		Auth:    authText(st.Authentication),
		Version: st.Build.Version, Uptime: durationText(s.now.Sub(st.StartedAt)),
		LUNs: countText(float64(len(st.LUNs))), Sessions: countText(float64(len(st.Sessions)))}
	var read, written float64
	for _, h := range s.rates.luns {
		read, written = read+h.now.readBytes, written+h.now.writeBytes
	}
	v.Reading, v.Writing = bytesText(read)+"/s", bytesText(written)+"/s"

	luns := slices.Clone(st.LUNs)
	slices.SortStableFunc(luns, func(a, b status.LUN) int { return int(a.LUN) - int(b.LUN) })
	s.trouble(v, luns)
	v.Short = len(luns) > manyLUNs
	selected, first := v.window(luns, at)
	for i := first; i < min(first+rowsPerPage, len(luns)); i++ {
		r := s.row(&luns[i], v.Short)
		r.Selected = i == selected
		v.Rows = append(v.Rows, r)
	}
	if selected >= 0 {
		v.One = s.detail(&luns[selected])
	}
	for i, info := range st.Sessions {
		if i == sessionsPerPage {
			v.MoreUsers = countText(float64(len(st.Sessions) - i))
			break
		}
		v.Users = append(v.Users, s.user(info))
	}
	s.uploads(v)
	v.Refused = s.refusals()
	return v
}

// uploads are shown below the LUNs: a volume has no LUN before its content is complete.
func (s *snapshot) uploads(v *view) {
	if s.status.Volumes == nil {
		return
	}
	all := s.status.Volumes.Uploads
	for i, u := range all {
		if i == uploadsPerPage {
			v.MoreUploads = countText(float64(len(all) - i))
			return
		}
		j := job{ID: "up" + u.Volume, What: u.Volume, Done: bytesText(float64(u.ReceivedBytes)),
			Percent: none, Left: none}
		if u.TotalBytes > 0 {
			j.Percent = percentText(u.ReceivedBytes, u.TotalBytes)
			j.Done += " of " + bytesText(float64(u.TotalBytes))
		}
		came, took := u.ReceivedBytes-u.StartedBytes, s.now.Sub(u.StartedAt)
		if came > 0 && took > 0 && u.TotalBytes > u.ReceivedBytes {
			rest := float64(u.TotalBytes-u.ReceivedBytes) / float64(came) * float64(took)
			j.Left = durationText(time.Duration(min(rest, 1e18))) + " left"
		}
		v.Uploads = append(v.Uploads, j)
	}
}

// window finds the selected LUN, or -1, and the first one that is shown.
func (v *view) window(luns []status.LUN, at selection) (selected, first int) {
	if len(luns) == 0 {
		return -1, 0
	}
	find := func(lun uint16) int {
		return slices.IndexFunc(luns, func(l status.LUN) bool { return l.LUN >= lun })
	}
	if selected = find(at.lun); at.lun > 0 && (selected < 0 || luns[selected].LUN != at.lun) {
		v.Missing = strconv.Itoa(int(at.lun))
		selected = max(selected, 0)
	}
	first = selected / rowsPerPage * rowsPerPage
	if at.from > 0 {
		first = max(find(at.from), 0)
		if at.lun == 0 {
			selected = first
		}
	}
	if first > 0 {
		v.Before = fmt.Sprintf("?from=%d", luns[max(0, first-rowsPerPage)].LUN)
	}
	if next := first + rowsPerPage; next < len(luns) {
		v.After = fmt.Sprintf("?from=%d", luns[next].LUN)
	}
	v.Paged = v.Before != "" || v.After != ""
	return selected, first
}

// row is a LUN in the table; short: in one line.
func (s *snapshot) row(l *status.LUN, short bool) row {
	r := row{LUN: l.LUN, Name: plain(l.Image), Size: bytesText(float64(l.SizeBytes)), Owner: none}
	if l.Owner != "" {
		r.Owner = plain(l.Owner)
	}
	if l.OpenTo != "" {
		r.OpenTo = "open to " + plain(l.OpenTo)
	}
	if len(l.Fenced) > 0 {
		r.Fenced = "fenced: " + plains(l.Fenced)
	}
	kind := []string{l.Format, l.CopyMode, l.AccessMode}
	if l.ReadOnly {
		kind = append(kind, "read-only")
	}
	r.Kind = strings.Join(kind, " · ")
	r.State, r.Note = stateOf(l, s.now)
	if short {
		r.Note = ""
	}
	h := s.rates.luns[l.LUN]
	if h == nil {
		h = &history{}
	}
	if c := l.Copy; c != nil && !c.Complete && c.DataBytes > 0 && l.CopyMode == "clone" {
		j := job{ID: fmt.Sprintf("copy%d", l.LUN), What: "copying the image",
			Percent: percentText(c.CopiedBytes, c.DataBytes),
			Done:    bytesText(float64(c.CopiedBytes)) + " of " + bytesText(float64(c.DataBytes)),
			Left:    none}
		if left := h.left(c.DataBytes - c.CopiedBytes); left > 0 && !c.WaitsForSpace {
			j.Left = durationText(left) + " left"
		}
		r.Jobs = append(r.Jobs, j)
	}
	r.ReadOps, r.WriteOps = countText(h.now.readOps), countText(h.now.writeOps)
	r.ReadRate, r.WriteRate = bytesText(h.now.readBytes)+"/s", bytesText(h.now.writeBytes)+"/s"
	r.ReadTime, r.WriteTime = latencyText(h.now.readTime), latencyText(h.now.writeTime)
	if short {
		return r
	}
	var top float64
	r.OpsUp, r.OpsDown, top = h.chart(s.rates.next, func(p point) float32 { return p.readOps },
		func(p point) float32 { return p.writeOps })
	r.OpsTop = countText(top) + "/s"
	r.RateUp, r.RateDown, top = h.chart(s.rates.next, func(p point) float32 { return p.readBytes },
		func(p point) float32 { return p.writeBytes })
	r.RateTop = bytesText(top) + "/s"
	if m := s.maps(l.LUN); m != nil {
		m = m.Fold(stripCells)
		r.Cells = len(m.Cells)
		r.Map = drawMap(m, len(m.Cells))
		r.Summary = summary(m)
	}
	return r
}

// summary describes the map.
func summary(m *disk.Map) string {
	sum := m.Total()
	var parts []string
	for _, p := range []struct {
		bytes int64
		what  string
	}{{sum.Image, "in the image"}, {sum.Copied, "copied"}, {sum.Written, "written"},
		{sum.Hole, "holes"}} {
		if p.bytes > 0 {
			parts = append(parts, percentText(p.bytes, m.Size)+" "+p.what)
		}
	}
	return strings.Join(parts, ", ")
}

func (s *snapshot) detail(l *status.LUN) *detail {
	auth, portal := s.status.Authentication, portalFor(s.status.Portals, s.asked, s.local)
	d := &detail{LUN: l.LUN, Name: plain(l.Image), Format: l.Format, Mode: l.CopyMode,
		Access: l.AccessMode, Serial: plain(l.Serial), NAA: l.NAA, Digest: plain(l.Digest),
		Platform: plain(l.PlatformDigest), Space: none, Portal: portal,
		CHAP: auth != status.AuthNone, NBD: nbdCommandsFor(&s.status, l, s.asked, s.local),
		VhostUser: vhostUserCommandsFor(l)}
	if len(s.status.Portals) > 0 || d.NBD == nil && d.VhostUser == nil {
		d.Commands = commandsFor(portal, &s.status, l)
	}
	switch {
	case l.Persistent:
		d.Kept = "on a volume"
	case l.CopyMode == "none":
		d.Kept = "in the image file"
	case l.UsageType != "":
		for _, u := range s.status.UsageTypes {
			if u.Name == l.UsageType {
				d.Kept = "in " + plain(u.Directory)
			}
		}
	case s.status.WorkDir != "":
		d.Kept = "in " + plain(s.status.WorkDir)
	default:
		d.Kept = "not for good: no volume or --work-dir is named"
	}
	if l.Space != nil {
		d.Space = bytesText(float64(l.Space.Used)) + " used, " +
			bytesText(float64(l.Space.Free)) + " free"
	}
	m := s.maps(l.LUN)
	if m == nil {
		return d
	}
	d.Columns = min(gridColumns, len(m.Cells))
	d.Rows = (len(m.Cells) + gridColumns - 1) / gridColumns
	d.Cell = bytesText(float64(m.CellBytes))
	d.Map = drawMap(m, gridColumns)
	sum := m.Total()
	d.Image, d.Copied = bytesText(float64(sum.Image)), bytesText(float64(sum.Copied))
	d.Written, d.Hole = bytesText(float64(sum.Written)), bytesText(float64(sum.Hole))
	return d
}

func (s *snapshot) user(info status.Session) user {
	var luns []string
	for _, lun := range info.LUNs {
		if len(luns) == 8 {
			luns = append(luns, "…")
			break
		}
		luns = append(luns, strconv.Itoa(int(lun)))
	}
	id := fmt.Sprintf("s%d", info.TSIH)
	if info.Protocol != "" {
		id = fmt.Sprintf("%s%d", info.Protocol, info.Since.UnixNano())
	}
	u := user{ID: id, Name: plain(info.Initiator), Alias: plain(info.Alias), From: info.Remote,
		Since: durationText(s.now.Sub(info.Since)), LUNs: strings.Join(luns, ", "),
		InFlight: strconv.Itoa(info.InFlight), Commands: countText(float64(info.Commands)),
		Read: bytesText(float64(info.BytesRead)), Written: bytesText(float64(info.BytesWritten))}
	if info.Discovery {
		u.LUNs = "discovery"
	}
	return u
}

func authText(kind string) string {
	switch kind {
	case status.AuthCHAP:
		return "CHAP"
	case status.AuthMutualCHAP:
		return "mutual CHAP"
	}
	return "no authentication"
}
