package identity

import (
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/kubernetes/api/v1alpha1"
	"kubevirt.io/disk/kubernetes/controller/controllertest"
)

// TestImageThatIsHeld: nothing is made for an identity whose image may not be used. One that has
// its disk keeps it, and is not ready.
func TestImageThatIsHeld(t *testing.T) {
	w := newWorld(t, v1alpha1.DiskSpec{Image: "a"})
	refusing := controllertest.Refusing(v1alpha1.ReasonNotSigned)
	w.images = &refusing
	w.settle()
	w.require("Ready", "False NotSigned", "the image has no signature")
	require.Equal(t, []string{"Warning NotSigned"}, w.Events())
	require.Zero(t, w.Made("PersistentVolumeClaim")+w.Made("Secret"))
	refusing = ""
	w.settle()
	w.require("Ready", "True Ready", "")
	refusing = v1alpha1.ReasonUnverified
	w.settle()
	w.require("Ready", "False Unverified", "")
	w.claim()
}
