package pages

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestTexts(t *testing.T) {
	for n, want := range map[float64]string{0: "0", 0.4: "0", 12: "12", 999: "999", 1000: "1,000",
		123456.7: "123,457", 1e9: "1,000,000,000"} {
		require.Equal(t, want, countText(n))
	}
	for d, want := range map[time.Duration]string{0: none, 300: "1 µs",
		85 * time.Microsecond:   "85 µs",
		1234 * time.Microsecond: "1.23 ms", 25 * time.Millisecond: "25 ms", 3 * time.Second: "3 s",
		1500 * time.Millisecond: "1.50 s"} {
		require.Equal(t, want, latencyText(d))
	}
	for d, want := range map[time.Duration]string{-time.Second: "0 s", 59 * time.Second: "59 s",
		61 * time.Second: "1 min", 90 * time.Minute: "1 h 30 min", 72 * time.Hour: "3 days"} {
		require.Equal(t, want, durationText(d))
	}
	require.Equal(t, "0 %", percentText(0, 10))
	require.Equal(t, "1 %", percentText(1, 1000), "a little is not nothing")
	require.Equal(t, "99 %", percentText(9999, 10000), "nearly all is not all")
	require.Equal(t, "100 %", percentText(10, 10))
	require.Equal(t, "0 %", percentText(0, 0))
	require.Equal(t, "iqn.a\ufffdb\ufffd", plain("iqn.a\u202eb\x00"))
	require.Equal(t, "a, b", plains([]string{"a", "b"}))
	require.Equal(t, "a, b, c, d, e, 2 more", plains([]string{"a", "b", "c", "d", "e", "f", "g"}))
}
