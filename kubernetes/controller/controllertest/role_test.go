package controllertest

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestRoleIsThatOfHelm compares a role with that of the manifest, which Helm has rendered.
func TestRoleIsThatOfHelm(t *testing.T) {
	manifest, err := os.ReadFile(Manifest(t))
	require.NoError(t, err)
	want := roleIn(t, manifest)
	require.Equal(t, want, RoleOf(t, Settings{Services: true,
		Snapshots: true, Exports: true}))
}

// TestSettingsOnlyAddRights: what a controller may do with its own setting alone, it may do with
// any others.
func TestSettingsOnlyAddRights(t *testing.T) {
	least := strings.Split(RoleOf(t, Settings{}).String(), "\n")
	all := Settings{Pets: true, Services: true, Snapshots: true, Exports: true, Volumes: true,
		Move: true, Fill: true, Signatures: true}
	most := strings.Split(RoleOf(t, all).String(), "\n")
	require.Subset(t, most, least)
	for _, s := range []Settings{{Pets: true}, {Services: true}, {Snapshots: true},
		{Exports: true}, {Volumes: true}, {Move: true}, {Fill: true}, {Signatures: true}} {
		one := strings.Split(RoleOf(t, s).String(), "\n")
		require.Subset(t, one, least, s)
		require.Subset(t, most, one, s)
		require.Greater(t, len(one), len(least), s)
	}
}
