package kubernetes

import (
	"testing"

	"kubevirt.io/disk/integration/kubernetes/plane"
)

func TestMain(m *testing.M) { plane.Main(m) }
