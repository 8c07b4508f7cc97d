package controllertest

import (
	"bytes"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/internal/testtool"
)

// TestRoleIsThatOfHelm compares a role with that of the manifest, which Helm has rendered.
func TestRoleIsThatOfHelm(t *testing.T) {
	want := roleIn(t, testtool.Must(os.ReadFile(Manifest(t)))(t))
	require.Equal(t, want, RoleOf(t, Settings{Services: true, Snapshots: true, Exports: true}))
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

// TestManifestKeepsItsCertificate: a manifest that is written again has the certificate of the
// webhook that it had, so that replicas and API server agree while it is applied.
func TestManifestKeepsItsCertificate(t *testing.T) {
	certificate := func(file string) string {
		text := testtool.Must(os.ReadFile(file))(t)
		found := regexp.MustCompile(`(caBundle|ca.crt|tls.crt|tls.key): \S+`).FindAll(text, -1)
		require.Len(t, found, 5)
		return string(bytes.Join(found, nil))
	}
	first := Manifest(t)
	require.Equal(t, certificate(first), certificate(Manifest(t, "-keep", first)))
	require.NotEqual(t, certificate(first), certificate(Manifest(t, "-keep", first+".none")))
}

// TestCertificateWithoutAnAuthority: a certificate that the API server cannot verify is refused
// when the chart is rendered. Otherwise each pod that asks for a disk would be refused.
func TestCertificateWithoutAnAuthority(t *testing.T) {
	_, wrong, err := tryRender("-set", "webhook.certificate.tls\\.crt=YQ==",
		"-set", "webhook.certificate.tls\\.key=YQ==")
	require.Error(t, err)
	require.Contains(t, wrong, "has no ca.crt")
}

// TestUnknownValues: a value with a typing error is refused. Helm would ignore it in silence, and
// with it, for example, the policy of signatures that somebody has written.
func TestUnknownValues(t *testing.T) {
	for set, want := range map[string]string{
		"signatures.polices.default.default=deny": "'polices' not allowed",
		"claimsize=1Gi":  "'claimsize' not allowed",
		"without={pet}":  "value must be one of 'pets'",
		"claims.fill=on": "want boolean",
	} {
		_, wrong, err := tryRender("-set", set)
		require.Error(t, err)
		require.Contains(t, wrong, want)
	}
}
