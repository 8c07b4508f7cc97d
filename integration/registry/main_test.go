// Package registry has the tests of images in registries: push, pull, streaming, commit,
// signatures.
package registry

import (
	"testing"

	"kubevirt.io/disk/integration/internal/rig"
)

func TestMain(m *testing.M) { rig.Main(m) }
