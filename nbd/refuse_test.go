package nbd

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// TestRefuse: while the disks are refused, nobody has one or gets one, however it asks, and the
// answer says why.
func TestRefuse(t *testing.T) {
	v := serve(t, 2, nil)
	v.Server.disks.Refuse(errors.New("nobody has asked for them"))
	require.Equal(t, "nobody has asked for them", string(v.hello(t).last(optGo,
		infoData("disk1.raw"), repErrPolicy)))
	v.Server.disks.Refuse(nil)
	user, chooser := v.open(t, "disk1.raw", extended), v.hello(t)
	const words = "after a live migration the guest would meet another disk"
	v.Server.disks.Refuse(errors.New(words))
	user.ended()
	chooser.ended()

	c := v.hello(t)
	require.Equal(t, uint32(repAck), c.option(optExtendedHeaders, nil)[0].kind)
	for number, data := range map[uint32][]byte{optGo: infoData("disk1.raw"), optList: nil,
		optInfo: infoData(""), optListMeta: metaData("2"), optSetMeta: metaData("disk1.raw",
			"base:allocation")} {
		require.Equal(t, words, string(c.last(number, data, repErrPolicy)))
	}
	c = v.hello(t)
	c.send(optionBytes(optExportName, []byte("disk1.raw")))
	c.ended()
	testtool.Eventually(t, func() bool { return len(v.Sessions()) == 0 })

	testtool.Need(t, "qemu-img")
	out, err := exec.CommandContext(t.Context(), "qemu-img", "info", v.uri("1")).CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), words)
}

// TestSameUser: at such an address only processes of the server's user are answered.
func TestSameUser(t *testing.T) {
	s := serve(t, 1, nil)
	l := testtool.Must(net.Listen("tcp4", "127.107.0.1:0"))(t)
	go func() { _ = s.Serve(l, Portal{Name: "unix:/the/socket", SameUser: true}) }()
	host, port := testtool.Must2(net.SplitHostPort(l.Addr().String()))(t)
	greeting := func(uid uint32) string {
		c := exec.Command("bash", "-c",
			"exec 3<>/dev/tcp/"+host+"/"+port+"; head -c 8 <&3 2>/dev/null || true")
		if uid != 0 {
			c.SysProcAttr = &syscall.SysProcAttr{
				Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		}
		return string(testtool.Must(c.Output())(t))
	}
	require.Equal(t, "NBDMAGIC", greeting(0))
	if os.Geteuid() != 0 {
		t.Skip("the rest needs root")
	}
	require.Empty(t, greeting(107))
}
