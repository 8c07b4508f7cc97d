package controllertest

import (
	"errors"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Calls counts the requests of a client, and makes one of them fail.
type Calls struct {
	Reads, Writes int
	writes        []bool // for each request, whether it was a write
	// Fail is the number of the request that fails, counted from 1; 0: none does. If Late is set, a
	// failing write is carried out, and only its answer is lost.
	Fail int
	Late bool
	// Err is the error of that request; nil: errLost.
	Err error
}

// errLost is a broken connection.
var errLost = errors.New("the connection to the API server is lost")

// Client is a client whose requests are counted.
func (c *Calls) Client(of client.WithWatch) client.WithWatch { return intercept(of, c.request) }

func (c *Calls) request(r request, do func() error) error {
	write := r.verb != "get" && r.verb != "list"
	if write {
		c.Writes++
	} else {
		c.Reads++
	}
	c.writes = append(c.writes, write)
	if c.Reads+c.Writes != c.Fail {
		return do()
	}
	if write && c.Late {
		if err := do(); err != nil {
			return err
		}
	}
	if c.Err != nil {
		return c.Err
	}
	return errLost
}

// Settle reconciles objects until nothing is left to do: no reconcile failed, wrote or wants to be
// repeated within a second, and others, unless it is nil, had nothing to do. It returns the last
// result.
func (c *Calls) Settle(t testing.TB, r Reconciler, others func() bool,
	names ...client.ObjectKey) (last ctrl.Result) {
	t.Helper()
	var errs error
	for range 40 {
		writes, soon := c.Writes, false
		errs = nil
		for _, name := range names {
			result, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: name})
			last, errs = result, errors.Join(errs, err)
			soon = soon || 0 < result.RequeueAfter && result.RequeueAfter < time.Second
		}
		busy := others != nil && others()
		if !busy && errs == nil && !soon && writes == c.Writes {
			return last
		}
	}
	require.Fail(t, "it does not settle", errs)
	return last
}

// Conflict is the API server's answer to a write of an object that somebody else has written.
func Conflict() error {
	return apierrors.NewConflict(schema.GroupResource{Resource: "objects"}, "x",
		errors.New("the object has been modified"))
}

// EachFault runs a test once for each request of a client, which fails at that request. A write
// fails twice: with a conflict, and with a lost answer. run makes a world, reconciles in it with
// the given client until nothing is left to do, and checks the end.
func EachFault(t *testing.T, run func(t *testing.T, calls *Calls)) {
	t.Helper()
	eachFault(t, run, true)
}

// EachWriteFault is EachFault for writes alone. A read that fails ends a reconcile between two
// writes, as the lost answer of the one before does.
func EachWriteFault(t *testing.T, run func(t *testing.T, calls *Calls)) {
	t.Helper()
	eachFault(t, run, false)
}

func eachFault(t *testing.T, run func(t *testing.T, calls *Calls), reads bool) {
	t.Helper()
	var whole Calls
	run(t, &whole)
	require.Positive(t, whole.Writes)
	for fail := 1; fail <= whole.Reads+whole.Writes; fail++ {
		faults := []Calls{{}}
		switch {
		case whole.writes[fail-1]:
			faults = []Calls{{Late: true}, {Err: Conflict()}}
		case !reads:
			continue
		}
		for _, calls := range faults {
			calls.Fail = fail
			run(t, &calls)
			if t.Failed() {
				t.Fatalf("with a fault at request %d: late %v, error %v", fail, calls.Late,
					calls.Err)
			}
		}
	}
}

// Late is a client that finds the object of a kind as it was, like a cache that has not heard of
// its changes.
func Late(of client.WithWatch, was client.Object) client.WithWatch {
	return intercept(of, func(r request, do func() error) error {
		if r.verb != "get" || reflect.TypeOf(r.object) != reflect.TypeOf(was) {
			return do()
		}
		reflect.ValueOf(r.object).Elem().Set(reflect.ValueOf(was.DeepCopyObject()).Elem())
		return nil
	})
}

// Labelled is a client that finds objects of some kinds only if they have a label, like a cache
// that has no others.
func Labelled(of client.WithWatch, label string, kinds ...client.Object) client.WithWatch {
	return intercept(of, func(r request, do func() error) error {
		err := do()
		limited := r.verb == "get" && slices.ContainsFunc(kinds, func(kind client.Object) bool {
			return reflect.TypeOf(kind) == reflect.TypeOf(r.object)
		})
		if err != nil || !limited || r.object.(client.Object).GetLabels()[label] != "" {
			return err
		}
		reflect.ValueOf(r.object).Elem().SetZero()
		return apierrors.NewNotFound(schema.GroupResource{Resource: "objects"}, r.name)
	})
}
