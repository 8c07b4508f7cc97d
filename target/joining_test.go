package target_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/target/internal/pdu"
	. "kubevirt.io/disk/target/targettest"
)

// TestJoiningTellsNothingBeforeAuthentication logs in with the TSIH of an existing session, and
// with others. Until the initiator has authenticated, the answers are the same, including the
// refusal of a wrong secret. Only afterwards do they differ.
func TestJoiningTellsNothingBeforeAuthentication(t *testing.T) {
	s := start(t, withCHAP())
	sess := s.login(t, LoginOptions{CHAP: good(), ISID: [6]byte{0x80, 3}})
	finder := LoginOptions{CHAP: good(), Discovery: true, ISID: [6]byte{0x80, 4}}
	discovery, err := Login(s.addr, finder)
	require.NoError(t, err)
	for _, c := range []struct {
		name   string
		id     LoginID
		as     LoginOptions
		status uint16 // once authenticated
	}{
		{"a session", LoginID{ISID: sess.ISID, TSIH: sess.TSIH}, LoginOptions{}, 0x0206},
		{"another handle", LoginID{ISID: sess.ISID, TSIH: sess.TSIH + 77}, LoginOptions{}, 0x020a},
		{"another identifier", LoginID{ISID: [6]byte{0x80, 9}, TSIH: sess.TSIH}, LoginOptions{},
			0x020a},
		{"another initiator", LoginID{ISID: sess.ISID, TSIH: sess.TSIH}, other, 0x020a},
		{"a discovery session", LoginID{ISID: discovery.ISID, TSIH: discovery.TSIH}, finder,
			0x0206},
		{"no discovery session", LoginID{ISID: discovery.ISID, TSIH: sess.TSIH}, finder, 0x020a},
	} {
		t.Run("6.3.1/"+c.name, func(t *testing.T) {
			c.as.ISID, c.as.TSIH = c.id.ISID, c.id.TSIH
			for chap, status := range map[*CHAP]uint16{
				{Username: user, Password: "a wrong password"}: 0x0201,
				{Username: "nobody", Password: password}:       0x0201,
				good():                                         c.status,
			} {
				c.as.CHAP = chap
				s.refused(t, c.as, status)
			}
			c.as.CHAP = nil
			s.refused(t, c.as, 0x0201)
			c.as.WithSecurity = true
			s.refused(t, c.as, 0x0201)
			sess.MustGood(t, TestUnitReady(1))
		})
	}
	_, err = discovery.Logout(pdu.LogoutCloseSession)
	require.NoError(t, err)
}

// TestJoiningIsRefusedWithoutAuthentication does the same on a target without authentication, in
// both stages. It answers at once.
func TestJoiningIsRefusedWithoutAuthentication(t *testing.T) {
	s := start(t)
	sess := s.login(t, LoginOptions{ISID: [6]byte{0x80, 3}})
	for _, o := range []LoginOptions{{}, {WithSecurity: true}} {
		o.ISID, o.TSIH = sess.ISID, sess.TSIH
		s.refused(t, o, 0x0206)
		o.TSIH += 77
		s.refused(t, o, 0x020a)
	}
	sess.MustGood(t, TestUnitReady(1))
}
