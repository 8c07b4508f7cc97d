package fill

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"kubevirt.io/disk/kubernetes/controller/controllertest"
)

// TestStepThatIsRefused: where a policy of the cluster keeps volumes as they are, the claim and the
// VMImage say so. When it lets them change, the claim gets its volume.
func TestStepThatIsRefused(t *testing.T) {
	w := newWorld(t, new(controllertest.Calls))
	allowed := w.r.Client
	w.r.Client = interceptor.NewClient(allowed.(client.WithWatch), interceptor.Funcs{
		Patch: func(ctx context.Context, in client.WithWatch, o client.Object, p client.Patch,
			all ...client.PatchOption) error {
			if _, volume := o.(*corev1.PersistentVolume); volume {
				return apierrors.NewForbidden(schema.GroupResource{Resource: "persistentvolumes"},
					o.GetName(), errors.New("volumes are kept"))
			}
			return in.Patch(ctx, o, p, all...)
		}})
	w.settle()
	const says = "the API server does not allow a step of the filling: persistentvolumes"
	require.Contains(t, w.says(), "Warning FillFailed "+says)
	require.Contains(t, w.image().Status.Claims[0].Message, says)
	w.r.Client = allowed
	w.settle()
	require.Equal(t, corev1.ClaimBound, w.claim("web").Status.Phase)
	require.Empty(t, w.image().Status.Claims)
}
