// Package images has the tests of the container image, built by buildah and run by podman and
// runc.
package images

import (
	"testing"

	"kubevirt.io/disk/integration/internal/rig"
)

func TestMain(m *testing.M) { rig.Main(m) }
