package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"go.uber.org/zap"

	"kubevirt.io/disk/serving"
	"kubevirt.io/disk/status"
)

// ParseHandover reads a step of a handover as the control socket takes it: a JSON object.
func ParseHandover(text string) (req status.Handover, err error) {
	decoder := json.NewDecoder(bytes.NewReader([]byte(text)))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&req); err != nil {
		return req, fmt.Errorf("want {\"action\":\"open\",\"lun\":1,\"to\":\"INITIATOR\"}: %w", err)
	}
	return req, nil
}

// Want carries out a step of a handover that a lasting place asks for, such as a file. So it is
// called again and again, even after a restart. It does not repeat a step that is already done.
// Every step names the initiator of the handover, so that an old request does not end a newer
// handover.
func (s *Server) Want(ctx context.Context, req status.Handover) (done string, err error) {
	to := serving.NormalName(req.To)
	have := s.handovers.disks.Holders(req.LUN)
	switch {
	case to == "":
		return "", errors.New("the initiator is missing (to): every step names it")
	case req.Action == status.ActionOpen && have.Guest == to:
		return fmt.Sprintf("LUN %d is open to %s too", req.LUN, to), nil
	case req.Action == status.ActionFinish && have.Guest == "" && have.Owner == to:
		return fmt.Sprintf("LUN %d belongs to %s", req.LUN, to), nil
	case req.Action == status.ActionFinish && have.Guest != to:
		return "", fmt.Errorf("LUN %d is not open to %s: open it to that initiator first", req.LUN,
			to)
	case req.Action == status.ActionCancel && have.Owner == to:
		return "", fmt.Errorf("LUN %d belongs to %s already, so there is nothing to cancel: open "+
			"it to the initiator that should have it", req.LUN, to)
	case req.Action == status.ActionCancel && have.Guest != to:
		return fmt.Sprintf("LUN %d is not open to %s", req.LUN, to), nil
	}
	if done, err = s.handovers.do(ctx, req); err == nil {
		s.log.Info("handover", zap.String("action", string(req.Action)), zap.Uint16("lun", req.LUN),
			zap.String("done", done))
	}
	return done, err
}
