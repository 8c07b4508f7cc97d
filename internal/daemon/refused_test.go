package daemon

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/disk/disktest/filetest"
	"kubevirt.io/disk/disk/instance"
	"kubevirt.io/disk/internal/daemon/options"
	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
	"kubevirt.io/disk/target/targettest"
)

// TestFullStorageIsSeen: while the writes of a guest fail for space, the page and /status say so of
// that LUN, and only of that one. The daemon stays ready: a restart would repair nothing. When
// writes succeed again, the trouble is gone.
func TestFullStorageIsSeen(t *testing.T) {
	opt, small := testOptions(t, "a.raw", "b.raw"), filetest.TinyFS(t, "4m")
	require.NoError(t, os.Truncate(filepath.Join(opt.Images.Dir, "a.raw"), 16<<20))
	filler := filetest.Put(t, small, "filler", filetest.Block(1, 2<<20), 0)
	opt.UsageTypes = options.UsageTypes{"small": small}
	opt.Settings.Disk.CopyMode = instance.CopyOnWrite
	opt.Settings.Disks = map[string]options.SingleDisk{
		"a.raw": {DiskSettings: options.DiskSettings{UsageType: "small"}}}
	d := start(t, opt)
	s := d.login(initiatorA, 1, 2)
	const blocks = 512
	data := bytes.Repeat([]byte{0x42}, blocks*512)
	before := time.Now()
	failed := int64(0)
	lba := uint32(0)
	for failed < 3 {
		lba += blocks
		r := testtool.Must(s.Do(targettest.Write10(1, lba, data)))(t)
		if r.Status != 0 {
			failed++
		}
	}
	s.MustGood(t, targettest.Write10(2, 0, data[:512]))
	luns := d.Status().LUNs
	require.Empty(t, luns[1].Troubles)
	require.Len(t, luns[0].Troubles, 1)
	trouble := luns[0].Troubles[0]
	require.Equal(t, "no_space", trouble.Kind)
	require.Contains(t, trouble.Message, "disk is full")
	require.Contains(t, trouble.Error, "no space")
	require.Equal(t, failed, trouble.Count)
	require.WithinRange(t, trouble.Since, before, trouble.Last)
	for path, part := range map[string]string{"/": "disk is full", "/status": `"no_space"`,
		"/readyz": "ok", "/healthz": "ok"} {
		require.Contains(t, d.page(path), part, path)
	}

	// A guest can still write where it has written before. It is no sign that storage has space.
	s.MustGood(t, targettest.Write10(1, blocks, data))
	require.Len(t, d.Status().LUNs[0].Troubles, 1)
	require.NoError(t, os.Remove(filler))
	testtool.Eventually(t, func() bool {
		s.MustGood(t, targettest.Write10(1, lba, data))
		return len(d.Status().LUNs[0].Troubles) == 0
	}, "the trouble is over: %+v", func() any { return d.Status().LUNs[0].Troubles })
	require.NotContains(t, d.page("/"), "disk is full")
	require.NoError(t, d.end())
}

// TestAChangedImageIsSeen: the guest of a disk that is not copied reads what somebody has written
// over its image. It cannot notice that, and the page does.
func TestAChangedImageIsSeen(t *testing.T) {
	opt := testOptions(t, "a.raw", "b.raw")
	opt.Settings.Disk.CopyMode = instance.CopyOnWrite
	d := start(t, opt)
	path := filepath.Join(opt.Images.Dir, "b.raw")
	require.NoError(t, os.Chtimes(path, time.Time{}, time.Now().Add(-time.Hour)))
	testtool.Eventually(t, func() bool { return len(d.Status().LUNs[1].Troubles) > 0 },
		"b.raw was changed")
	require.Empty(t, d.Status().LUNs[0].Troubles)
	for path, part := range map[string]string{"/": "somebody has written to the image",
		"/status": `"failing"`, "/readyz": "ok", "/healthz": "ok"} {
		require.Contains(t, d.page(path), part, path)
	}
	require.NoError(t, d.end())
}

// TestRefusedLoginsAreSeen: who was refused, with which name, why and how often, and never a
// secret.
func TestRefusedLoginsAreSeen(t *testing.T) {
	opt := testOptions(t, "a.raw")
	opt.CHAP.Initiator = credential("user", "correct-horse-battery")
	d := start(t, opt)
	portal := testtool.Must(netip.ParseAddrPort(d.Status().Portals[0]))(t)
	for range 3 {
		_, err := targettest.Login(net.TCPAddrFromAddrPort(portal), targettest.LoginOptions{
			Initiator: initiatorA,
			CHAP:      &targettest.CHAP{Username: "some<body", Password: "wrong-horse-battery"}})
		require.Error(t, err)
	}
	var all []status.RefusedLogin
	testtool.Eventually(t, func() bool { // the answer comes before the record
		all = d.Status().RefusedLogins
		return len(all) == 1 && all[0].Count == 3
	}, "three are counted: %+v", func() any { return all })
	one := all[0]
	require.Equal(t, []string{"127.0.0.1", initiatorA, "some<body"},
		[]string{one.From, one.Initiator, one.User})
	require.NotEmpty(t, one.Reason)
	require.NotEmpty(t, one.Error)
	require.WithinRange(t, one.Last, one.Since, time.Now())
	body := d.page("/")
	require.Contains(t, body, "some&lt;body")
	require.Contains(t, body, "3 times")
	require.NotContains(t, string(testtool.Must(json.Marshal(d.Status()))(t)), "horse")
	var lines []observer.LoggedEntry
	testtool.Eventually(t, func() bool { // the record comes before the line of the log
		lines = d.log.FilterMessage("login refused").All()
		return len(lines) == 3
	}, "three are logged: %v", func() any { return lines })
	require.Equal(t, "some<body", lines[0].ContextMap()["user"])
	require.NotContains(t, fmt.Sprint(d.log.All()), "horse")
	require.NoError(t, d.end())
}

// TestRefusedLoginsAreBounded: strangers cannot make the record large, and one address cannot push
// out what others have tried.
func TestRefusedLoginsAreBounded(t *testing.T) {
	var l refusedLogins
	now, long := time.Now(), strings.Repeat("é", 1<<16)
	failure := errors.New(long)
	add := func(from, name string) {
		l.add(serving.LoginEvent{Remote: from, Client: name, User: name, Reason: "x",
			Err: failure}, now)
	}
	first := now
	add("10.0.0.1:1", "victim")
	now = now.Add(time.Minute)
	add("10.0.0.1:2", "victim")
	for i := range 1000 {
		add(fmt.Sprintf("10.0.0.2:%d", i), long[:1<<11]+"/"+fmt.Sprint(i))
		add(fmt.Sprintf("10.0.0.2:%d", i), fmt.Sprint(i))
	}
	all := l.latest(now)
	require.Len(t, all, 1+maxRefusedFrom)
	victim := all[len(all)-1]
	require.Equal(t, "victim", victim.Initiator)
	require.Equal(t, []time.Time{first, now}, []time.Time{victim.Since, victim.Last})
	require.EqualValues(t, 2, victim.Count)
	for i := range 1000 {
		add(fmt.Sprintf("[fd00::%x]:1", i), "a\xffb")
	}
	all = l.latest(now)
	require.Len(t, all, maxRefused)
	require.Less(t, len(testtool.Must(json.Marshal(all))(t)), maxRefused*5*maxRefusedText)
	require.Equal(t, "ab", all[0].Initiator)
	require.Empty(t, l.latest(now.Add(refusedFor)))
}
