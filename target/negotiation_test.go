package target_test

import (
	"errors"
	"fmt"
	"math/rand"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	. "kubevirt.io/disk/target/targettest"
)

// negotiate logs in with one exchange of operational keys, and returns the answers.
func (s *server) negotiate(t *testing.T, discovery bool, keys Keys) *LoginReply {
	t.Helper()
	first := names()
	if discovery {
		first = KV("InitiatorName", DefaultInitiator, "SessionType", "Discovery")
	}
	c := MustDial(t, s.addr)
	r, err := c.LoginStep(loginID, LoginPDU{CSG: StageOperational, NSG: StageFull, Transit: true,
		Keys: append(first, keys...)})
	require.NoError(t, err)
	_ = c.Close()
	return r
}

func TestNegotiationAnswers(t *testing.T) {
	s := start(t)
	for _, tt := range []struct{ section, key, value, want string }{
		{"13.1", "HeaderDigest", "CRC32C", "CRC32C"},
		{"13.1", "HeaderDigest", "None", "None"},
		{"13.1", "HeaderDigest", "CRC32C,None", "CRC32C"},
		{"13.1", "HeaderDigest", "None,CRC32C", "None"},
		{"13.1", "DataDigest", "X-com.example.sha,CRC32C", "CRC32C"},
		{"13.1", "DataDigest", "crc32c", "Reject"},
		{"13.1", "DataDigest", "", "Reject"},
		{"13.2", "MaxConnections", "1", "1"},
		{"13.2", "MaxConnections", "65535", "1"},
		{"13.2", "MaxConnections", "0", "Reject"},
		{"13.2", "MaxConnections", "65536", "Reject"},
		{"13.10", "InitialR2T", "Yes", "Yes"},
		{"13.10", "InitialR2T", "No", "No"},
		{"13.10", "InitialR2T", "yes", "Reject"},
		{"13.11", "ImmediateData", "Yes", "Yes"},
		{"13.11", "ImmediateData", "No", "No"},
		{"13.11", "ImmediateData", "1", "Reject"},
		{"13.13", "MaxBurstLength", "512", "512"},
		{"13.13", "MaxBurstLength", "511", "Reject"},
		{"13.13", "MaxBurstLength", "16777216", "Reject"},
		{"13.13", "MaxBurstLength", "0x1000", "4096"},
		{"13.13", "MaxBurstLength", "ten", "Reject"},
		{"13.13", "MaxBurstLength", "-1", "Reject"},
		{"13.13", "MaxBurstLength", "18446744073709551616", "Reject"},
		{"13.15", "DefaultTime2Wait", "0", "0"},
		{"13.15", "DefaultTime2Wait", "3600", "3600"},
		{"13.15", "DefaultTime2Wait", "3601", "Reject"},
		{"13.16", "DefaultTime2Retain", "20", "0"},
		{"13.17", "MaxOutstandingR2T", "1", "1"},
		{"13.17", "MaxOutstandingR2T", "0", "Reject"},
		{"13.18", "DataPDUInOrder", "Yes", "Yes"},
		{"13.18", "DataPDUInOrder", "No", "Yes"},
		{"13.19", "DataSequenceInOrder", "No", "Yes"},
		{"13.20", "ErrorRecoveryLevel", "0", "0"},
		{"13.20", "ErrorRecoveryLevel", "2", "0"},
		{"13.20", "ErrorRecoveryLevel", "3", "Reject"},
		{"13.23", "TaskReporting", "FastAbort,ResponseFence,RFC3720", "RFC3720"},
		{"13.24", "iSCSIProtocolLevel", "1", "1"},
		{"RFC 7144 7.1.1", "iSCSIProtocolLevel", "0", "0"},
		{"RFC 7144 7.1.1", "iSCSIProtocolLevel", "2", "2"},
		{"RFC 7144 7.1.1", "iSCSIProtocolLevel", "31", "2"},
		{"RFC 7144 7.1.1", "iSCSIProtocolLevel", "32", "Reject"},
		{"RFC 7144 7.1.1", "iSCSIProtocolLevel", "two", "Reject"},
		{"13.25", "IFMarkInt", "2048~4096", "Reject"},
		{"13.25", "OFMarkInt", "2048", "Reject"},
		{"6.2", "X-com.example.key", "value", "NotUnderstood"},
		{"6.2", "NewStandardKey", "value", "NotUnderstood"},
	} {
		t.Run(fmt.Sprintf("%s/%s=%s", tt.section, tt.key, tt.value), func(t *testing.T) {
			r := s.negotiate(t, false, KV(tt.key, tt.value))
			if tt.key == "MaxBurstLength" && r.Status() == 0x0200 && tt.want != "Reject" {
				// With a short MaxBurstLength alone, the default FirstBurstLength would exceed it
				// (13.14).
				r = s.negotiate(t, false, KV(tt.key, tt.value, "FirstBurstLength", "512"))
			}
			require.Equal(t, fmt.Sprintf("%04x", 0), fmt.Sprintf("%04x", r.Status()))
			require.Equal(t, []string{tt.want}, r.Keys.All(tt.key))
		})
	}
	for _, key := range []string{"IFMarker", "OFMarker"} {
		t.Run("13.25/"+key, func(t *testing.T) {
			for _, value := range []string{"Yes", "No"} {
				require.Contains(t, []string{"No", "Reject"},
					s.negotiate(t, false, KV(key, value)).Keys.Get(key))
			}
		})
	}
	t.Run("13.12/MaxRecvDataSegmentLength is declared by each side", func(t *testing.T) {
		for _, value := range []string{"512", "8192", "16777215", "0x200"} {
			r := s.negotiate(t, false, KV("MaxRecvDataSegmentLength", value))
			require.Zero(t, r.Status())
			n, err := strconv.Atoi(r.Keys.Get("MaxRecvDataSegmentLength"))
			require.NoError(t, err)
			require.True(t, n >= 8192 && n < 1<<24, "%d", n)
		}
		for _, value := range []string{"511", "16777216", "0", "", "x", "8192~16384"} {
			r := s.negotiate(t, false, KV("MaxRecvDataSegmentLength", value))
			require.Equal(t, uint8(2), r.StatusClass,
				"%s: a declaration cannot be answered with Reject", value)
		}
	})
	t.Run("13.26/X#NodeArchitecture is declared, and needs no answer", func(t *testing.T) {
		r := s.negotiate(t, false,
			KV("X#NodeArchitecture", "ExampleOS/v1,ExampleInc/1.05a", "InitiatorAlias", "tester"))
		require.Zero(t, r.Status())
		require.Empty(t, r.Keys.All("X#NodeArchitecture"))
		require.Empty(t, r.Keys.All("InitiatorAlias"))
	})
	t.Run("13.14/FirstBurstLength means nothing without unsolicited data", func(t *testing.T) {
		r := s.negotiate(t, false,
			KV("InitialR2T", "Yes", "ImmediateData", "No", "FirstBurstLength", "65536",
				"MaxBurstLength", "512"))
		require.Zero(t, r.Status())
		v := r.Keys.Get("FirstBurstLength")
		n, err := strconv.Atoi(v)
		require.True(t, v == "Irrelevant" || err == nil && n <= 65536, v)
	})
	t.Run("13.14/FirstBurstLength never ends above MaxBurstLength", func(t *testing.T) {
		// Neither by its default, nor where MaxBurstLength comes after it.
		require.Equal(t, uint16(0x0200),
			s.negotiate(t, false, KV("MaxBurstLength", "512", "InitialR2T", "No")).Status())
		c := MustDial(t, s.addr)
		_, err := c.LoginStep(loginID,
			LoginPDU{CSG: StageOperational,
				Keys: append(names(), KV("FirstBurstLength", "65536", "InitialR2T", "No")...)})
		require.NoError(t, err)
		r, err := c.LoginStep(loginID,
			LoginPDU{CSG: StageOperational, NSG: StageFull, Transit: true,
				Keys: KV("MaxBurstLength", "8192")})
		require.NoError(t, err)
		require.Equal(t, uint16(0x0200), r.Status())
	})
	t.Run("6.2/reserved words are not proposals", func(t *testing.T) {
		for _, word := range []string{"Reject", "Irrelevant", "NotUnderstood"} {
			for _, key := range []string{"MaxBurstLength", "InitialR2T", "HeaderDigest"} {
				r := s.negotiate(t, false, KV(key, word))
				require.True(t, r.StatusClass == 2 || r.Keys.Get(key) == "Reject",
					"%s=%s is answered with %s", key, word, r.Keys.Get(key))
			}
		}
	})
	t.Run("13.21/irrelevant keys in a discovery session", func(t *testing.T) {
		r := s.negotiate(t, true, KV("MaxConnections", "4", "InitialR2T", "No", "ImmediateData",
			"Yes", "MaxBurstLength", "4096",
			"FirstBurstLength", "4096", "MaxOutstandingR2T", "4", "DataPDUInOrder", "No",
			"DataSequenceInOrder", "No"))
		require.Zero(t, r.Status())
		for _, k := range []string{"MaxConnections", "InitialR2T", "ImmediateData",
			"MaxBurstLength", "FirstBurstLength",
			"MaxOutstandingR2T", "DataPDUInOrder", "DataSequenceInOrder"} {
			require.Equal(t, "Irrelevant", r.Keys.Get(k), k)
		}
	})
	t.Run("13.21/relevant keys in a discovery session", func(t *testing.T) {
		r := s.negotiate(t, true,
			KV("HeaderDigest", "CRC32C", "DefaultTime2Wait", "7", "ErrorRecoveryLevel", "1"))
		require.Equal(t, []string{"CRC32C", "7", "0"},
			[]string{r.Keys.Get("HeaderDigest"), r.Keys.Get("DefaultTime2Wait"),
				r.Keys.Get("ErrorRecoveryLevel")})
	})
}

// TestNegotiationProperty proposes random values in random order, split over random PDUs. Login
// checks that the answers are legal outcomes, and Session that the session keeps to them.
func TestNegotiationProperty(t *testing.T) {
	s := start(t)
	seed := rand.Int63()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewSource(seed))
	length := func() string {
		n := []int{512, 513, 1024, 4096, 8192, 65536, 262144, 1 << 20, 1<<24 - 1}[r.Intn(9)]
		return strconv.Itoa(n)
	}
	yesNo := func() string { return []string{"Yes", "No"}[r.Intn(2)] }
	data := pattern(300*BlockSize, 1)
	refused := 0
	for range 60 {
		o := LoginOptions{Keys: KV("MaxRecvDataSegmentLength", length(), "MaxBurstLength", length(),
			"FirstBurstLength", length(),
			"InitialR2T", yesNo(), "ImmediateData", yesNo(), "MaxOutstandingR2T",
			strconv.Itoa(1+r.Intn(4)),
			"DefaultTime2Wait", strconv.Itoa(r.Intn(10)), "MaxConnections",
			strconv.Itoa(1+r.Intn(8))),
			HeaderDigest: r.Intn(2) == 0, DataDigest: r.Intn(2) == 0, CmdSN: r.Uint32()}
		shuffle := func(keys Keys) {
			r.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
		}
		o.Edit = func(step int, p *LoginPDU) {
			if step == 0 {
				shuffle(p.Keys)
			}
		}
		c := MustDial(t, s.addr)
		sess, err := c.Login(o)
		var le *LoginError
		if errors.As(err, &le) {
			require.Equal(t, uint16(0x0200), le.Status, "%v", o.Keys)
			refused++
			continue
		}
		require.NoError(t, err, "%v", o.Keys)
		_, err = sess.ClearAttention(1)
		require.NoError(t, err)
		blocks := 1 + r.Intn(300)
		w := sess.MustDo(t, Write10(1, 7, data[:blocks*BlockSize]))
		require.True(t, w.Good(), "%v: %s", o.Keys, w.Failed())
		require.Equal(t, data[:blocks*BlockSize], sess.MustGood(t, Read10(1, 7, blocks)).Data, "%v",
			o.Keys)
		require.NoError(t, c.Close())
	}
	require.Zero(t, refused, "burst lengths that contradict each other can be answered by "+
		"smaller ones (13.14)")
}
