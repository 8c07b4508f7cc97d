package controllertest

import (
	"context"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
)

// request is one of a client's.
type request struct {
	ctx       context.Context
	verb, sub string // as in a role; sub is the subresource
	name      string // "" if it names no object
	object    any    // a client.Object, client.ObjectList or runtime.ApplyConfiguration
	dry       bool   // it changes nothing
}

func (r request) changes() bool { return r.verb != "get" && r.verb != "list" && !r.dry }

// kind is the kind of the object, for a client.
func (r request) kind(c client.Client) (schema.GroupVersionKind, error) {
	if o, ok := r.object.(runtime.Object); ok {
		return c.GroupVersionKindFor(o)
	}
	return r.object.(interface {
		GroupVersionKind() schema.GroupVersionKind
	}).GroupVersionKind(), nil
}

// intercept is a client whose requests are given to handle. do carries one out.
func intercept(of client.WithWatch, handle func(r request, do func() error) error,
) client.WithWatch {
	about := func(ctx context.Context, verb string, o client.Object) request {
		return request{ctx: ctx, verb: verb, name: o.GetName(), object: o}
	}
	return interceptor.NewClient(of, interceptor.Funcs{
		Get: func(ctx context.Context, in client.WithWatch, key client.ObjectKey, o client.Object,
			opts ...client.GetOption) error {
			return handle(request{ctx: ctx, verb: "get", name: key.Name, object: o},
				func() error { return in.Get(ctx, key, o, opts...) })
		},
		List: func(ctx context.Context, in client.WithWatch, l client.ObjectList,
			opts ...client.ListOption) error {
			return handle(request{ctx: ctx, verb: "list", object: l},
				func() error { return in.List(ctx, l, opts...) })
		},
		Create: func(ctx context.Context, in client.WithWatch, o client.Object,
			opts ...client.CreateOption) error {
			var all client.CreateOptions
			all.ApplyOptions(opts)
			return handle(request{ctx: ctx, verb: "create", object: o, dry: len(all.DryRun) > 0},
				func() error { return in.Create(ctx, o, opts...) })
		},
		Delete: func(ctx context.Context, in client.WithWatch, o client.Object,
			opts ...client.DeleteOption) error {
			return handle(about(ctx, "delete", o),
				func() error { return in.Delete(ctx, o, opts...) })
		},
		Update: func(ctx context.Context, in client.WithWatch, o client.Object,
			opts ...client.UpdateOption) error {
			return handle(about(ctx, "update", o),
				func() error { return in.Update(ctx, o, opts...) })
		},
		Patch: func(ctx context.Context, in client.WithWatch, o client.Object, p client.Patch,
			opts ...client.PatchOption) error {
			return handle(about(ctx, "patch", o),
				func() error { return in.Patch(ctx, o, p, opts...) })
		},
		Apply: func(ctx context.Context, in client.WithWatch, o runtime.ApplyConfiguration,
			opts ...client.ApplyOption) error {
			name := o.(interface{ GetName() string }).GetName()
			return handle(request{ctx: ctx, verb: "apply", name: name, object: o},
				func() error { return in.Apply(ctx, o, opts...) })
		},
		SubResourcePatch: func(ctx context.Context, in client.Client, sub string, o client.Object,
			p client.Patch, opts ...client.SubResourcePatchOption) error {
			r := about(ctx, "patch", o)
			r.sub = sub
			return handle(r, func() error { return in.SubResource(sub).Patch(ctx, o, p, opts...) })
		},
	})
}
