package libvirt

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCheckName(t *testing.T) {
	for _, name := range []string{
		"iqn.2017-01.io.kubevirt:wrapper", "iqn.2001-04.com.example",
		"iqn.2001-04.com.example:storage:diskarrays-sn-a8675309",
		"iqn.2001-12.com.ex-ample:storage.tape1.sys1.xyz", "eui.02004567A425678D",
		"eui.02004567a425678d",
		"naa.52004567BA64678D", "naa.62004567BA64678D0123456789ABCDEF",
		"iqn.2001-04.com.example:" + strings.Repeat("a", maxNameLength-24),
	} {
		require.NoError(t, CheckName(name), name)
	}
	for name, want := range map[string]string{
		"":                                "iqn.",
		"disk":                            "iqn.",
		"IQN.2017-01.io.kubevirt":         "iqn.",
		"iqn.2017-01.io.kubevirt:Wrapper": "iqn.2017-01.io.kubevirt:wrapper",
		"iqn.2017-1.io.kubevirt":          "YEAR-MONTH",
		"iqn.2017-13.io.kubevirt":         "YEAR-MONTH",
		"iqn.17-01.io.kubevirt":           "YEAR-MONTH",
		"iqn.2017-01":                     "YEAR-MONTH",
		"iqn.2017-01.":                    "YEAR-MONTH",
		"iqn.2017-01.io..kubevirt":        "YEAR-MONTH",
		"iqn.2017-01.io.kubevirt:":        "YEAR-MONTH",
		"iqn.2017-01.io.kubevirt:a b":     "' '",
		"iqn.2017-01.io.kubevirt:a_b":     "'_'",
		"iqn.2017-01.io.kubevirt:a\x00":   `'\x00'`,
		"iqn.2017-01.io.kubevirt:ä":       "'ä'",
		"eui.123":                         "16 hexadecimal",
		"eui.02004567A425678G":            "16 hexadecimal",
		"naa.123":                         "16 or 32",
		"iqn.2001-04.com.example:" + strings.Repeat("a", maxNameLength-23): "224 bytes",
	} {
		require.ErrorContains(t, CheckName(name), want, name)
	}
}
